/* The entry points for multicast objects. Release, map, export and import are the allocations' entry points. */
#include "cuda.h"

/* A handle must be exportable; an attribute (132) shows whether a device supports that. */
static result check(const multicast_prop *prop) {
    NEED(prop && prop->devices && prop->devices <= GIS_MAX_DEVICES && !prop->flags && !(prop->handle_types & ~15u));
    if (prop->handle_types & (gis_windows ? GIS_FABRIC : 6u)) return NOT_SUPPORTED;
    int supported = 1;
    for (int device = 0; device < gis_device_count; device++)
        if (!gis_overridden(device, 132, &supported) || supported) return SUCCESS;
    return NOT_SUPPORTED;
}

result multicast_granularity(size_t *granularity, const multicast_prop *prop, uint32_t option) {
    ENTER(cuMulticastGetGranularity);
    result code = check(prop);
    if (code) return code;
    NEED(granularity && option <= 1);
    bool large = prop->size > GIS_GRANULARITY; /* measured: the size counts */
    *granularity = option && large ? GIS_RECOMMENDED : GIS_GRANULARITY;
    return SUCCESS;
}

result multicast_create(handle *group, const multicast_prop *prop) {
    ENTER(cuMulticastCreate);
    result code = check(prop);
    if (code) return code;
    NEED(group);
    gis_vmm_handle *made;
    TRY(gis_multicast_create(prop->devices, prop->size, (uint32_t)prop->handle_types, &made));
    *group = made->object.id;
    return SUCCESS;
}

#define FIND_GROUP(VARIABLE, HANDLE)                              \
    gis_vmm_handle *VARIABLE = gis_check(GIS_MULTICAST, HANDLE); \
    NEED(VARIABLE)

result multicast_add(handle group, int device) {
    ENTER(cuMulticastAddDevice);
    FIND_GROUP(found, group);
    int supported = 1;
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    if (gis_overridden(device, 132, &supported) && !supported) return NOT_SUPPORTED;
    return gis_code(gis_multicast_add(found, device));
}

/* device: -1 in the calls of CUDA 12, which use the device of the memory. */
static result bind_memory(handle group, int device, size_t offset, handle memory, size_t start, size_t size,
                          uint64_t flags) {
    FIND_GROUP(found, group);
    gis_vmm_handle *bound = gis_check(GIS_VMM_HANDLE, memory);
    NEED(bound && !flags);
    if (device < 0) device = bound->object.device;
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    return gis_code(gis_multicast_bind(found, device, offset, bound, start, size, &bound->object));
}

result multicast_bind_memory(handle group, size_t offset, handle memory, size_t start, size_t size, uint64_t flags) {
    ENTER(cuMulticastBindMem);
    return bind_memory(group, -1, offset, memory, start, size, flags);
}

result multicast_bind_memory_2(handle group, int device, size_t offset, handle memory, size_t start, size_t size,
                               uint64_t flags) {
    ENTER(cuMulticastBindMem);
    NEED(device >= 0);
    return bind_memory(group, device, offset, memory, start, size, flags);
}

/* Memory of cuMemCreate that is mapped there, not a multicast object. */
static result bind_address(handle group, int device, size_t offset, uint64_t address, size_t size, uint64_t flags) {
    FIND_GROUP(found, group);
    gis_range *range = gis_range_at(address);
    NEED(!flags && range && range->object.kind == GIS_VMM_MAPPING && size <= range->base + range->size - address);
    gis_vmm_handle *bound = (gis_vmm_handle *)range->owner;
    NEED(!bound->team);
    if (device < 0) device = bound->object.device;
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    size_t start = range->offset + (address - range->base);
    return gis_code(gis_multicast_bind(found, device, offset, bound, start, size, &range->object));
}

result multicast_bind_address(handle group, size_t offset, uint64_t address, size_t size, uint64_t flags) {
    ENTER(cuMulticastBindAddr);
    return bind_address(group, -1, offset, address, size, flags);
}

result multicast_bind_address_2(handle group, int device, size_t offset, uint64_t address, size_t size,
                                uint64_t flags) {
    ENTER(cuMulticastBindAddr);
    NEED(device >= 0);
    return bind_address(group, device, offset, address, size, flags);
}

result multicast_unbind(handle group, int device, size_t offset, size_t size) {
    ENTER(cuMulticastUnbind);
    FIND_GROUP(found, group);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    return gis_code(gis_multicast_unbind(found, device, offset, size));
}
