/* The operations of streams: which memory they use, and whether they can. */
#include "gis.h"

#include <stdlib.h>
#include <string.h>

typedef enum { PAGEABLE, PINNED, DEVICE } place;

typedef struct {
    place place;
    int device;
    uintptr_t at; /* the address that the work really uses */
} operand;

static unsigned long long hex(uintptr_t address) { return (unsigned long long)address; }

static gis_status touch(gis_op *op, gis_stream *stream, uintptr_t address, size_t size, operand *found) {
    gis_range *range = gis_range_at(address);
    found->place = PAGEABLE;
    found->device = stream->object.device;
    found->at = range ? range->lands + (address - range->base) : address;
    if (!range) {
        if (gis_is_freed(address)) {
            gis_violation("%#llx is used after its memory was freed or unmapped", hex(address));
            return GIS_INVALID_VALUE;
        }
        if (gis_reservation_at(address)) {
            gis_violation("%#llx is a reserved address without memory", hex(address));
            return GIS_INVALID_VALUE;
        }
        return address ? GIS_OK : GIS_INVALID_VALUE;
    }
    if (size > range->size - (address - range->base)) return GIS_INVALID_VALUE;
    gis_op_needs(op, &range->object);
    if (range->object.kind == GIS_HOST_ALLOCATION || range->object.kind == GIS_REGISTRATION) {
        found->place = PINNED;
        return GIS_OK;
    }
    found->place = DEVICE;
    found->device = range->object.device;
    if (range->object.kind == GIS_VMM_MAPPING && ((gis_vmm_handle *)range->owner)->team) {
        gis_violation("%#llx is a multicast address: only multimem instructions may touch it", hex(address));
        found->device = stream->object.device;
        op->failure = GIS_ILLEGAL_ADDRESS;
        return GIS_OK;
    }
    if (!(range->access & 1u << stream->object.device)) {
        gis_violation("%#llx: device %d was not given access to this mapping", hex(address), stream->object.device);
        op->failure = GIS_ILLEGAL_ADDRESS;
    } else if (range->object.kind == GIS_VMM_MAPPING) {
        found->device = stream->object.device; /* access was granted */
    }
    if (range->object.kind == GIS_MAPPING && range->owner && !range->owner->live &&
        !((gis_external_memory *)range->owner)->outlived)
        gis_violation("%#llx: its external memory was destroyed", hex(address));
    return GIS_OK;
}

static bool reachable(const gis_stream *stream, const operand *it) {
    return it->place != DEVICE || it->device == stream->object.device ||
           (stream->object.context->peers & 1u << it->device);
}

static void note_foreign(const gis_stream *stream, const operand *it, uintptr_t address) {
    gis_violation("%#llx is memory of device %d, used on a stream of device %d without peer access", hex(address),
                  it->device, stream->object.device);
}

/* The stream's device can copy to and from any other device; for other copies it needs access to both sides. */
static void check_peers(const gis_stream *stream, const operand *a, uintptr_t first, const operand *b,
                        uintptr_t second) {
    if (a->place == DEVICE && b->place == DEVICE &&
        (a->device == stream->object.device || b->device == stream->object.device))
        return;
    if (!reachable(stream, a)) note_foreign(stream, a, first);
    if (!reachable(stream, b)) note_foreign(stream, b, second);
}

static gis_status reject(gis_op *op, gis_status status) {
    gis_op_free(op);
    return status;
}

gis_status gis_copy(gis_stream *stream, uintptr_t target, uintptr_t source, size_t size, bool block) {
    operand to, from;
    if (!size) return GIS_OK;
    gis_op *op = gis_op_new(GIS_OP_COPY);
    gis_status status = touch(op, stream, target, size, &to);
    if (!status) status = touch(op, stream, source, size, &from);
    if (status) return reject(op, status);
    check_peers(stream, &to, target, &from, source);
    op->copy.target = to.at;
    op->copy.source = from.at;
    op->copy.size = size;
    /* The device cannot reach this memory by itself, so the call returns when the stream has done the copy. */
    return gis_submit(stream, op, block || to.place == PAGEABLE || from.place == PAGEABLE);
}

gis_status gis_fill(gis_stream *stream, uintptr_t target, uint32_t value, uint32_t width, size_t count) {
    operand to;
    if (!count) return GIS_OK;
    if (target % width) return GIS_INVALID_VALUE;
    gis_op *op = gis_op_new(GIS_OP_FILL);
    gis_status status = touch(op, stream, target, count * width, &to);
    if (!status && to.place == PAGEABLE) status = GIS_INVALID_VALUE;
    if (status) return reject(op, status);
    if (!reachable(stream, &to)) note_foreign(stream, &to, target);
    op->fill.target = to.at;
    op->fill.value = value;
    op->fill.width = width;
    op->fill.count = count;
    return gis_submit(stream, op, false);
}

gis_status gis_word(gis_stream *stream, gis_op_kind kind, uintptr_t address, uint64_t value, uint64_t mask,
                    uint32_t condition) {
    operand to;
    if (address % sizeof value) return GIS_INVALID_VALUE;
    gis_op *op = gis_op_new(kind);
    gis_status status = touch(op, stream, address, sizeof value, &to);
    if (!status && to.place == PAGEABLE) status = GIS_INVALID_VALUE;
    if (status) return reject(op, status);
    if (!reachable(stream, &to)) note_foreign(stream, &to, address);
    op->word.address = to.at;
    op->word.value = value;
    op->word.mask = mask;
    op->word.condition = condition;
    return gis_submit(stream, op, false);
}

/* The part of a multicast object at an address; NULL if there is none. */
static gis_range *multicast_at(uintptr_t address, size_t bytes) {
    gis_range *range = gis_range_at(address);
    bool is = range && range->object.kind == GIS_VMM_MAPPING && ((gis_vmm_handle *)range->owner)->team;
    return is && bytes <= range->size - (address - range->base) ? range : NULL;
}

gis_op *gis_multimem_op(gis_stream *stream, gis_op_kind kind, uintptr_t target, uintptr_t address, uint32_t value,
                        size_t count, gis_status *status) {
    operand to;
    gis_op *op = gis_op_new(kind);
    op->multimem.target = target;
    op->multimem.address = address;
    op->multimem.value = value;
    op->multimem.count = count;
    gis_range *range = multicast_at(address, count * sizeof value);
    *status = GIS_OK;
    if (kind == GIS_OP_MULTIMEM_ADD) {
        *status = touch(op, stream, target, count * sizeof value, &to);
        if (!*status && to.place == PAGEABLE) op->failure = GIS_ILLEGAL_ADDRESS;
        if (!*status && !reachable(stream, &to)) note_foreign(stream, &to, target);
    }
    if (*status) {
        gis_op_free(op);
        return NULL;
    }
    if (!range || address % sizeof value) {
        gis_violation("%#llx is no multicast address of %zu words, the only kind for multimem instructions",
                      hex(address), count);
        op->failure = GIS_ILLEGAL_ADDRESS;
        return op;
    }
    if (!(range->access & 1u << stream->object.device)) {
        gis_violation("%#llx: device %d was not given access to this mapping", hex(address), stream->object.device);
        op->failure = GIS_ILLEGAL_ADDRESS;
    }
    op->multimem.group = (gis_vmm_handle *)range->owner;
    op->multimem.offset = address - range->base + range->offset;
    gis_op_needs(op, &range->object);
    gis_op_needs(op, range->owner);
    return op;
}

/* multimem.st at once and without a stream, for tests. */
GIS_EXPORT int gis_control_multimem_store(uint64_t address, uint32_t *words, uint64_t count) {
    pthread_mutex_lock(&gis_mutex);
    gis_range *range = multicast_at(address, count * sizeof *words);
    gis_status status = GIS_INVALID_VALUE;
    if (range) {
        size_t offset = address - range->base + range->offset;
        status = gis_multicast_store((gis_vmm_handle *)range->owner, offset, words, count);
    }
    pthread_mutex_unlock(&gis_mutex);
    return gis_code(status);
}

static gis_status resolve(gis_op *op, gis_stream *stream, const gis_end *end, const gis_block *block, uintptr_t *start,
                          uint64_t *pitch, uint64_t *slice, operand *found) {
    if (end->level) {
        const gis_level *level = end->level;
        const gis_plane *plane = &level->plane;
        uint64_t texel = level->array->image.texel;
        if (level->level >= level->array->image.present || end->x % texel || block->width % texel ||
            end->x + block->width > plane->width * texel || end->y + block->height > plane->height ||
            end->z + block->depth > plane->depth)
            return GIS_INVALID_VALUE;
        *start = level->array->base + plane->offset + end->z * plane->slice + end->y * plane->pitch + end->x;
        *pitch = plane->pitch;
        *slice = plane->slice;
        found->place = DEVICE;
        found->device = level->object.device;
        gis_op_needs(op, &end->level->object);
        if (!level->array->memory->object.live)
            gis_violation("the array %#llx is used after its external memory was destroyed",
                          (unsigned long long)level->array->object.id);
        return GIS_OK;
    }
    uint64_t row = end->pitch ? end->pitch : end->x + block->width;
    uint64_t rows = end->height ? end->height : end->y + block->height;
    if (row < end->x + block->width || rows < end->y + block->height) return GIS_INVALID_VALUE;
    *pitch = row;
    *slice = row * rows;
    *start = end->address + end->z * *slice + end->y * row + end->x;
    uint64_t last = (block->depth - 1) * *slice + (block->height - 1) * row + block->width;
    gis_status status = touch(op, stream, *start, last, found);
    *start = found->at;
    return status;
}

gis_status gis_copy_3d(gis_stream *stream, const gis_end *target, const gis_end *source, const gis_block *size) {
    operand to, from;
    if (!size->width || !size->height || !size->depth) return GIS_OK;
    gis_op *op = gis_op_new(GIS_OP_COPY_3D);
    gis_status status = resolve(op, stream, target, size, &op->copy3d.target, &op->copy3d.target_pitch,
                                &op->copy3d.target_slice, &to);
    if (!status)
        status = resolve(op, stream, source, size, &op->copy3d.source, &op->copy3d.source_pitch,
                         &op->copy3d.source_slice, &from);
    if (status) return reject(op, status);
    check_peers(stream, &to, op->copy3d.target, &from, op->copy3d.source);
    op->copy3d.width = size->width;
    op->copy3d.height = size->height;
    op->copy3d.depth = size->depth;
    return gis_submit(stream, op, to.place == PAGEABLE || from.place == PAGEABLE);
}

gis_op *gis_semaphore_op(gis_op_kind kind, uint32_t count, const uint64_t *ids, const uint64_t *values, const void *raw,
                         size_t raw_size, gis_status *status) {
    gis_op *op = gis_op_new(kind);
    *status = GIS_OK;
    op->semaphores.count = count;
    op->semaphores.raw_size = raw_size;
    op->semaphores.semaphores = calloc(count + 1, sizeof(void *));
    op->semaphores.ids = calloc(count + 1, sizeof(uint64_t));
    op->semaphores.values = calloc(count + 1, sizeof(uint64_t));
    op->semaphores.raw = malloc(count * raw_size + 1);
    if (!op->semaphores.semaphores || !op->semaphores.ids || !op->semaphores.values || !op->semaphores.raw) abort();
    memcpy(op->semaphores.raw, raw, count * raw_size);
    for (uint32_t i = 0; i < count; i++) {
        gis_semaphore *semaphore = gis_check(GIS_EXTERNAL_SEMAPHORE, ids[i]);
        if (!semaphore) {
            *status = GIS_INVALID_HANDLE;
            op->semaphores.count = i;
            gis_op_free(op);
            return NULL;
        }
        op->semaphores.semaphores[i] = semaphore;
        op->semaphores.ids[i] = ids[i];
        op->semaphores.values[i] = values[i];
        gis_op_needs(op, &semaphore->object);
    }
    return op;
}
