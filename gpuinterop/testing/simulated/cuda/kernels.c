/*
 * Modules and kernels: two kernels are recognized by their names. Their code is not read.
 *
 *     gpuinterop_multimem_store(u64 address, u32 value, u32 count)     multimem.st
 *     gpuinterop_multimem_add(u64 target, u64 address, u32 count)      multimem.ld_reduce, then an ordinary store
 */
#include "cuda.h"

#include <string.h>

static const struct {
    const char *name, *entry;
    gis_op_kind kind;
} kernels[] = {
    {"gpuinterop_multimem_store", ".entry gpuinterop_multimem_store", GIS_OP_MULTIMEM_STORE},
    {"gpuinterop_multimem_add", ".entry gpuinterop_multimem_add", GIS_OP_MULTIMEM_ADD},
};
#define KERNELS (sizeof kernels / sizeof *kernels)

typedef struct {
    gis_object object;
    gis_op_kind kind;
} function;

typedef struct {
    gis_object object;
    bool has[KERNELS];
    handle functions[KERNELS]; /* made on request */
} module;

result module_load(handle *loaded, const void *image) {
    ENTER(cuModuleLoadData);
    NEED_CONTEXT;
    NEED(loaded && image);
    if (!strstr(image, ".version") || !strstr(image, ".target sm_")) return INVALID_PTX;
    module *made = gis_new(GIS_MODULE, sizeof *made, context, context->object.device, NULL);
    for (size_t i = 0; i < KERNELS; i++) made->has[i] = strstr(image, kernels[i].entry) != NULL;
    *loaded = made->object.id;
    return SUCCESS;
}

result module_unload(handle loaded) {
    ENTER(cuModuleUnload);
    FIND(module, found, GIS_MODULE, loaded);
    for (size_t i = 0; i < KERNELS; i++) {
        function *it = found->functions[i] ? gis_find(GIS_FUNCTION, found->functions[i]) : NULL;
        if (!it) continue;
        gis_note_if_used(&it->object, "");
        gis_retire(&it->object);
    }
    gis_retire(&found->object);
    return SUCCESS;
}

result module_function(handle *asked, handle loaded, const char *name) {
    ENTER(cuModuleGetFunction);
    FIND(module, found, GIS_MODULE, loaded);
    NEED(asked && name);
    for (size_t i = 0; i < KERNELS; i++) {
        if (!found->has[i] || strcmp(name, kernels[i].name)) continue;
        if (!found->functions[i]) {
            function *made = gis_new(GIS_FUNCTION, sizeof *made, found->object.context, found->object.device, NULL);
            made->kind = kernels[i].kind;
            found->functions[i] = made->object.id;
        }
        *asked = found->functions[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

result launch_kernel(handle which_function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                     uint32_t block_y, uint32_t block_z, uint32_t shared, handle which, void **parameters,
                     void **extra) {
    ENTER(cuLaunchKernel);
    NEED_CONTEXT;
    NEED_STREAM(which);
    FIND(function, found, GIS_FUNCTION, which_function);
    if (extra) return NOT_SUPPORTED;
    NEED(grid_x && grid_y && grid_z && block_x && block_y && block_z && !shared && parameters);
    NEED((uint64_t)block_x * block_y * block_z <= 1024);
    if (found->object.context != stream->object.context) return INVALID_HANDLE;
    uint64_t first;
    uint32_t count;
    memcpy(&first, parameters[0], sizeof first);
    memcpy(&count, parameters[2], sizeof count);
    uint64_t target = 0, address = first;
    uint32_t value = 0;
    if (found->kind == GIS_OP_MULTIMEM_STORE) {
        memcpy(&value, parameters[1], sizeof value);
    } else {
        target = first;
        memcpy(&address, parameters[1], sizeof address);
    }
    if (!count) return SUCCESS;
    gis_status status;
    gis_op *op = gis_multimem_op(stream, found->kind, target, address, value, count, &status);
    TRY(status);
    gis_op_needs(op, &found->object);
    return gis_code(gis_submit(stream, op, false));
}
