/* Stream capture and graphs. */
#define _GNU_SOURCE
#include "gis.h"

#include <stdlib.h>
#include <string.h>

static gis_capture *captures; /* those in progress */
static __thread gis_capture_mode thread_mode = GIS_CAPTURE_GLOBAL;

/* -- sets of nodes ------------------------------------------------------------------------------------------------- */

void gis_nodes_add(gis_nodes *nodes, gis_node *node) {
    for (uint32_t i = 0; i < nodes->count; i++)
        if (nodes->node[i] == node) return;
    if (nodes->count == nodes->room) {
        nodes->room = nodes->room ? 2 * nodes->room : 4;
        nodes->node = realloc(nodes->node, nodes->room * sizeof *nodes->node);
        if (!nodes->node) abort();
    }
    nodes->node[nodes->count++] = node;
}

void gis_nodes_clear(gis_nodes *nodes) { nodes->count = 0; }

void gis_nodes_union(gis_nodes *nodes, const gis_nodes *more) {
    for (uint32_t i = 0; i < more->count; i++) gis_nodes_add(nodes, more->node[i]);
}

/* -- graphs -------------------------------------------------------------------------------------------------------- */

static void finish_graph(gis_object *object) { free(((gis_graph *)object)->nodes.node); }

static void finish_node(gis_object *object) {
    gis_node *node = (gis_node *)object;
    gis_op_free(node->op);
    free(node->after.node);
}

gis_graph *gis_graph_create(void) { return gis_new(GIS_GRAPH, sizeof(gis_graph), NULL, 0, finish_graph); }

gis_node *gis_graph_add(gis_graph *graph, gis_op *op, const gis_nodes *after) {
    gis_node *node = gis_new(GIS_GRAPH_NODE, sizeof *node, NULL, 0, finish_node);
    node->graph = graph;
    node->op = op;
    gis_nodes_union(&node->after, after);
    gis_nodes_add(&graph->nodes, node);
    return node;
}

void gis_graph_destroy(gis_graph *graph) {
    for (uint32_t i = 0; i < graph->nodes.count; i++) gis_retire(&graph->nodes.node[i]->object);
    gis_retire(&graph->object);
}

static void finish_executable(gis_object *object) {
    gis_executable *it = (gis_executable *)object;
    for (uint32_t i = 0; i < it->count; i++) gis_op_free(it->operations[i]);
    free(it->operations);
    free(it->node);
}

gis_status gis_instantiate(gis_graph *graph, gis_executable **result) {
    gis_executable *it = gis_new(GIS_EXECUTABLE, sizeof *it, NULL, 0, finish_executable);
    it->count = graph->nodes.count;
    it->operations = calloc(it->count + 1, sizeof *it->operations);
    it->node = calloc(it->count + 1, sizeof *it->node);
    if (!it->operations || !it->node) abort();
    for (uint32_t i = 0; i < it->count; i++) {
        it->operations[i] = gis_op_clone(graph->nodes.node[i]->op);
        it->node[i] = graph->nodes.node[i]->object.id;
    }
    *result = it;
    return GIS_OK;
}

gis_status gis_launch(gis_executable *it, gis_stream *stream) {
    gis_op *op = gis_op_new(GIS_OP_GRAPH);
    op->graph.count = it->count;
    op->graph.operations = calloc(it->count + 1, sizeof *op->graph.operations);
    if (!op->graph.operations) abort();
    for (uint32_t i = 0; i < it->count; i++) {
        /* Copy the parameters now: later changes are for later launches. */
        op->graph.operations[i] = gis_op_clone(it->operations[i]);
        for (uint32_t k = 0; k < it->operations[i]->objects; k++) {
            gis_object *object = it->operations[i]->object[k];
            if (!object->live)
                gis_violation("a graph is launched whose %s %#llx was destroyed", gis_kind_name(object->kind),
                              (unsigned long long)object->id);
        }
    }
    gis_op_needs(op, &it->object);
    return gis_submit(stream, op, false);
}

/* -- capture ------------------------------------------------------------------------------------------------------- */

gis_capture_mode gis_exchange_mode(gis_capture_mode mode) {
    gis_capture_mode before = thread_mode;
    thread_mode = mode;
    return before;
}

gis_status gis_not_capturing(gis_stream *stream) {
    if (stream->capture) {
        stream->capture->invalid = true;
        return GIS_CAPTURE_UNSUPPORTED;
    }
    gis_status status = gis_capture_implicit(stream, false);
    return status ? status : gis_unsafe();
}

gis_status gis_unsafe(void) {
    gis_status status = GIS_OK;
    pid_t thread = gis_thread_id();
    if (thread_mode == GIS_CAPTURE_RELAXED) return GIS_OK;
    for (gis_capture *it = captures; it; it = it->next) {
        bool mine = it->thread == thread && it->mode != GIS_CAPTURE_RELAXED;
        if (mine || (thread_mode == GIS_CAPTURE_GLOBAL && it->mode == GIS_CAPTURE_GLOBAL)) {
            it->invalid = true;
            status = GIS_CAPTURE_UNSUPPORTED;
        }
    }
    return status;
}

gis_status gis_unsafe_in_any(void) {
    for (gis_capture *it = captures; it; it = it->next) it->invalid = true;
    return captures ? GIS_CAPTURE_UNSUPPORTED : GIS_OK;
}

typedef struct {
    gis_context *context;
    gis_capture *found;
} search;

static void find_captured(gis_object *object, void *argument) {
    search *it = argument;
    gis_stream *stream = (gis_stream *)object;
    if (stream->capture && stream->blocking && object->context == it->context) it->found = stream->capture;
}

gis_status gis_capture_implicit(gis_stream *stream, bool asking) {
    if (!captures || stream != stream->object.context->legacy) return GIS_OK;
    search it = {stream->object.context, NULL};
    gis_each(GIS_STREAM, find_captured, &it);
    if (!it.found) return GIS_OK;
    if (!asking) it.found->invalid = true; /* asking whether a stream is in capture keeps the capture valid */
    return GIS_CAPTURE_IMPLICIT;
}

gis_status gis_capture_begin(gis_stream *stream, gis_capture_mode mode) {
    if (stream->error) return stream->error;
    if (stream == stream->object.context->legacy) return GIS_CAPTURE_UNSUPPORTED;
    if (stream->capture) return GIS_ILLEGAL_STATE;
    gis_capture *it = calloc(1, sizeof *it);
    if (!it) abort();
    it->id = gis_new_id();
    it->refs = 1;
    it->mode = mode;
    it->thread = gis_thread_id();
    it->origin = stream;
    gis_ref(&stream->object);
    it->graph = gis_graph_create();
    it->next = captures;
    captures = it;
    stream->capture = it; /* the stream owns the reference */
    gis_nodes_clear(&stream->tip);
    return GIS_OK;
}

void gis_capture_unref(gis_capture *it) {
    if (--it->refs) return;
    gis_unref(&it->origin->object);
    free(it);
}

static void leave(gis_object *object, void *capture) {
    gis_stream *stream = (gis_stream *)object;
    if (stream->capture != capture) return;
    stream->capture = NULL;
    gis_nodes_clear(&stream->tip);
    gis_capture_unref(capture);
}

static void finish_capture(gis_capture *it) {
    it->graph = NULL;
    it->ended = true;
    for (gis_capture **link = &captures; *link; link = &(*link)->next) {
        if (*link == it) {
            *link = it->next;
            break;
        }
    }
    it->refs++;
    gis_each(GIS_STREAM, leave, it);
    gis_capture_unref(it);
}

void gis_capture_abandon(gis_stream *stream) {
    gis_capture *it = stream->capture;
    it->invalid = true;
    if (it->origin != stream) {
        leave(&stream->object, it);
        return;
    }
    gis_graph_destroy(it->graph);
    finish_capture(it);
}

static void reach(gis_node *node) {
    if (node->reached) return;
    node->reached = true;
    for (uint32_t i = 0; i < node->after.count; i++) reach(node->after.node[i]);
}

gis_status gis_capture_end(gis_stream *stream, gis_graph **graph) {
    gis_capture *it = stream->capture;
    *graph = NULL;
    if (!it) return GIS_ILLEGAL_STATE;
    if (it->origin != stream) return GIS_CAPTURE_UNMATCHED;
    if (it->mode != GIS_CAPTURE_RELAXED && it->thread != gis_thread_id()) return GIS_CAPTURE_WRONG_THREAD;
    gis_status status = it->invalid ? GIS_CAPTURE_INVALIDATED : GIS_OK;
    for (uint32_t i = 0; i < stream->tip.count; i++) reach(stream->tip.node[i]);
    for (uint32_t i = 0; i < it->graph->nodes.count && !status; i++)
        if (!it->graph->nodes.node[i]->reached) status = GIS_CAPTURE_UNJOINED;
    if (status)
        gis_graph_destroy(it->graph);
    else
        *graph = it->graph;
    finish_capture(it);
    return status;
}
