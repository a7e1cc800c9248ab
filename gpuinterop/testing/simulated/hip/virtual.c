/* Virtual memory management. */
#include "hip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BY_VALUE 70100000 /* since 7.1 an import gets the descriptor itself (as torch distinguishes) */

#define RETAINED 70300000 /* an assumption: since 7.3 a retained handle is counted (rocm-systems #2696) */

/* HIP has no code for an operation that is not permitted. */
static hip_error code_of(gis_status status) {
    return status == GIS_NOT_PERMITTED ? hipErrorNotSupported : gis_code(status);
}

static hip_error check(const hip_allocation_prop *prop) {
    NEED(prop && prop->type == 1 && prop->where.type == 1);
    NEED_DEVICE(prop->where.id);
    if (prop->handle_types & ~(gis_windows ? 7u : 1u | GIS_FABRIC)) return hipErrorNotSupported;
    return hipSuccess;
}

HIP(hipMemGetAllocationGranularity, (size_t *granularity, const hip_allocation_prop *prop, uint32_t option),
    (granularity, prop, option)) {
    ENTER(hipMemGetAllocationGranularity);
    hip_error code = check(prop);
    if (code) return code;
    NEED(granularity && option <= 1);
    *granularity = option ? GIS_RECOMMENDED : GIS_GRANULARITY;
    return hipSuccess;
}

HIP(hipMemCreate, (void **allocation, size_t size, const hip_allocation_prop *prop, uint64_t flags),
    (allocation, size, prop, flags)) {
    ENTER(hipMemCreate);
    hip_error code = check(prop);
    if (code) return code;
    NEED(allocation && !flags);
    gis_vmm_handle *made;
    gis_status status = gis_vmm_create(prop->where.id, size, prop->handle_types, &made);
    if (status) return code_of(status);
    *allocation = (void *)made->object.id;
    return hipSuccess;
}

HIP(hipMemRelease, (void *allocation), (allocation)) {
    ENTER(hipMemRelease);
    gis_vmm_handle *found = gis_check(GIS_VMM_HANDLE, (uint64_t)allocation);
    NEED(found);
    TRY(gis_vmm_release(found));
    return hipSuccess;
}

HIP(hipMemExportToShareableHandle, (void *shared, void *allocation, uint32_t type, uint64_t flags),
    (shared, allocation, type, flags)) {
    ENTER(hipMemExportToShareableHandle);
    gis_vmm_handle *found = gis_check(GIS_VMM_HANDLE, (uint64_t)allocation);
    NEED(found && shared && !flags);
    if (gis_windows && (type == 2 || type == 4)) {
        memcpy(shared, &found->object.id, sizeof(void *));
        return hipSuccess;
    }
    if (type == GIS_FABRIC) return code_of(gis_fabric_export(found, shared));
    if (type != 1) return hipErrorNotSupported;
    NEED(found->handle_types & 1);
    int fd = dup(found->fd);
    if (fd < 0) return hipErrorUnknown;
    memcpy(shared, &fd, sizeof fd);
    return hipSuccess;
}

HIP(hipMemImportFromShareableHandle, (void **allocation, void *shared, uint32_t type), (allocation, shared, type)) {
    ENTER(hipMemImportFromShareableHandle);
    NEED(allocation);
    gis_vmm_handle *made;
    if (type == GIS_FABRIC) {
        NEED(shared);
        gis_status status = gis_fabric_import(shared, &made);
        if (status) return code_of(status);
        *allocation = (void *)made->object.id;
        return hipSuccess;
    }
    if (type != 1) return hipErrorNotSupported;
    int fd = (int)(intptr_t)shared;
    if (hip_version() < BY_VALUE) {
        if ((uintptr_t)shared < 4096) { /* a descriptor, and not a pointer to one */
            gis_violation("HIP %d takes a pointer to the descriptor, and was given %d", hip_version(), fd);
            return hipErrorInvalidValue;
        }
        memcpy(&fd, shared, sizeof fd);
    }
    if (gis_vmm_import(fd, &made)) return hipErrorInvalidValue; /* the descriptor stays the caller's */
    *allocation = (void *)made->object.id;
    return hipSuccess;
}

HIP(hipMemAddressReserve, (void **address, size_t size, size_t alignment, void *wanted, uint64_t flags),
    (address, size, alignment, wanted, flags)) {
    ENTER(hipMemAddressReserve);
    (void)wanted;
    NEED(address && !flags);
    uintptr_t made;
    TRY(gis_vmm_reserve(size, alignment, &made));
    *address = (void *)made;
    return hipSuccess;
}

HIP(hipMemAddressFree, (void *address, size_t size), (address, size)) {
    ENTER(hipMemAddressFree);
    TRY(gis_vmm_free_address((uintptr_t)address, size));
    return hipSuccess;
}

/*
 * The offset must be 0 (HIP's documentation of the argument). If something cannot be mapped, the call still succeeds,
 * and hipMemSetAccess is the first to fail (CLR, hip_vm.cpp:252-272). The call goes through the null stream.
 */
HIP(hipMemMap, (void *address, size_t size, size_t offset, void *allocation, uint64_t flags),
    (address, size, offset, allocation, flags)) {
    ENTER(hipMemMap);
    gis_vmm_handle *found = gis_check(GIS_VMM_HANDLE, (uint64_t)allocation);
    NEED(found && !flags && !offset);
    if (hip_is_device(found->object.device))
        TRY(gis_stream_synchronize(gis_legacy_stream(hip_context_of(found->object.device))));
    gis_vmm_map((uintptr_t)address, size, 0, found);
    return hipSuccess;
}

/*
 * It uses the null stream of the memory's device, and so waits for blocking streams (CLR, hip_vm.cpp:353).
 * Before 7.1 only the first mapping is unmapped.
 */
HIP(hipMemUnmap, (void *address, size_t size), (address, size)) {
    ENTER(hipMemUnmap);
    gis_range *range = gis_range_at((uintptr_t)address);
    if (range && hip_is_device(range->object.device))
        TRY(gis_stream_synchronize(gis_legacy_stream(hip_context_of(range->object.device))));
    if (range && range->size < size && hip_version() < BY_VALUE)
        gis_violation("%p (%zu bytes) has several mappings: HIP %d unmaps the first", address, size, hip_version());
    TRY(gis_vmm_unmap((uintptr_t)address, size));
    return hipSuccess;
}

HIP(hipMemSetAccess, (void *address, size_t size, const hip_access_desc *desc, size_t count),
    (address, size, desc, count)) {
    ENTER(hipMemSetAccess);
    NEED(desc && count);
    for (size_t i = 0; i < count; i++) {
        NEED(desc[i].where.type == 1 && (desc[i].flags == 0 || desc[i].flags == 1 || desc[i].flags == 3));
        TRY(gis_vmm_access((uintptr_t)address, size, desc[i].where.id, (int)desc[i].flags));
    }
    return hipSuccess;
}

HIP(hipMemGetAccess, (uint64_t *flags, const hip_location *where, void *address), (flags, where, address)) {
    ENTER(hipMemGetAccess);
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(flags && where && where->type == 1 && hip_is_device(where->id) && range &&
         range->object.kind == GIS_VMM_MAPPING);
    *flags = range->access & 1u << where->id ? 3 : 0;
    return hipSuccess;
}

/*
 * For memory that is not a mapping CLR follows a null pointer (hip_vm.cpp:308; fixed by rocm-systems #5807). Before
 * RETAINED the handle gets no further reference, so a release takes its owner's.
 */
HIP(hipMemRetainAllocationHandle, (void **allocation, void *address), (allocation, address)) {
    ENTER(hipMemRetainAllocationHandle);
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(allocation && range);
    if (range->object.kind != GIS_VMM_MAPPING) {
        fprintf(stderr, "hipMemRetainAllocationHandle of %p, which is no mapping: AMD's runtime crashes\n", address);
        abort();
    }
    gis_vmm_handle *found = (gis_vmm_handle *)range->owner;
    if (hip_version() >= RETAINED) gis_vmm_retain(found);
    *allocation = (void *)found->object.id;
    return hipSuccess;
}

HIP(hipMemGetAllocationPropertiesFromHandle, (hip_allocation_prop *prop, void *allocation), (prop, allocation)) {
    ENTER(hipMemGetAllocationPropertiesFromHandle);
    gis_vmm_handle *found = gis_check(GIS_VMM_HANDLE, (uint64_t)allocation);
    NEED(found && prop);
    memset(prop, 0, sizeof *prop);
    prop->type = 1;
    prop->handle_types = found->handle_types;
    prop->where = (hip_location){1, found->object.device};
    return hipSuccess;
}
