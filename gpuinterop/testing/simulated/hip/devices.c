/* The runtime itself, devices, the current device and the last error of each thread. */
#include "hip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tests recognize this library by it. */
GIS_EXPORT const int gpuinterop_simulated_driver = 1;

#define VERSION 70151831 /* 7.1.51831 */

static __thread int current;
static __thread hip_error last;

hip_error hip_told(hip_error code) {
    if (code && code != hipErrorNotReady) last = code;
    return code;
}

static int number_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

int hip_version(void) { return number_of("GPUINTEROP_SIM_HIP_VERSION", VERSION); }

/* GPUINTEROP_SIM_INIT: a runtime that does not work, or another code for no device (101 in Debian's HIP 5.2). */
static hip_error init(void) {
    int code = number_of("GPUINTEROP_SIM_INIT", 0);
    if (!code && !gis_device_count) code = hipErrorNoDevice;
    if (!code) gis_initialize();
    return code;
}

hip_error hip_start(void) {
    hip_error code = gis_ready ? hipSuccess : init();
    return code == hipErrorInvalidDevice ? hipErrorNoDevice : code;
}

bool hip_is_device(int device) { return device >= 0 && device < gis_device_count; }

int hip_current(void) { return current; }

gis_context *hip_context_of(int device) {
    gis_context *context = gis_devices[device].primary;
    if (!context && gis_primary_retain(device, &context)) abort(); /* held until the process ends */
    return context;
}

gis_context *hip_context(void) { return hip_context_of(current); }

HIP(hipInit, (uint32_t flags), (flags)) {
    BEGIN_CALL(hipInit);
    NEED(!flags);
    return init();
}

HIP(hipRuntimeGetVersion, (int *version), (version)) {
    BEGIN_CALL(hipRuntimeGetVersion);
    NEED(version);
    *version = hip_version();
    return hipSuccess;
}

HIP(hipDriverGetVersion, (int *version), (version)) {
    BEGIN_CALL(hipDriverGetVersion);
    NEED(version);
    *version = hip_version();
    return hipSuccess;
}

GIS_EXPORT const char *hipGetErrorName(hip_error code) {
    const gis_error *found = gis_error_of(code);
    return found ? found->name : "hipErrorUnknown";
}

GIS_EXPORT const char *hipGetErrorString(hip_error code) {
    const gis_error *found = gis_error_of(code);
    return found ? found->text : "unknown error";
}

GIS_EXPORT hip_error hipGetLastError(void) {
    hip_error code = last;
    last = hipSuccess;
    return code;
}

GIS_EXPORT hip_error hipPeekAtLastError(void) { return last; }

HIP(hipGetDeviceCount, (int *count), (count)) {
    ENTER(hipGetDeviceCount);
    NEED(count);
    *count = gis_device_count;
    return hipSuccess;
}

HIP(hipGetDevice, (int *device), (device)) {
    ENTER(hipGetDevice);
    NEED(device);
    *device = current;
    return hipSuccess;
}

HIP(hipSetDevice, (int device), (device)) {
    ENTER(hipSetDevice);
    NEED_DEVICE(device);
    current = device;
    return hipSuccess;
}

HIP(hipDeviceGetName, (char *name, int size, int device), (name, size, device)) {
    ENTER(hipDeviceGetName);
    NEED_DEVICE(device);
    NEED(name && size > 0);
    snprintf(name, (size_t)size, "Simulated AMD GPU %d", device);
    return hipSuccess;
}

/* The sixteen characters of AMD's serial number, which is not Vulkan's deviceUUID (ROCm/hipamd #50). */
static void write_uuid(uint8_t *uuid, int device) {
    char text[17];
    snprintf(text, sizeof text, "5f3a91d07c2e48%02x", (unsigned)device & 0xff);
    memcpy(uuid, text, 16);
}

HIP(hipDeviceGetUuid, (uint8_t *uuid, int device), (uuid, device)) {
    ENTER(hipDeviceGetUuid);
    NEED_DEVICE(device);
    NEED(uuid);
    write_uuid(uuid, device);
    return hipSuccess;
}

HIP(hipDeviceGetPCIBusId, (char *text, int size, int device), (text, size, device)) {
    ENTER(hipDeviceGetPCIBusId);
    NEED_DEVICE(device);
    NEED(text && size > 0);
    snprintf(text, (size_t)size, "0000:%02x:00.0", 0xc3 + device);
    return hipSuccess;
}

/* hipDeviceAttribute_t as of ROCm 6 and later. */
static int attribute(int number, int device, bool *known) {
    static const struct {
        int number, value;
    } table[] = {
        {3, 1},      /* CanMapHostMemory */
        {4, 1},      /* CanUseHostPointerForRegisteredMem */
        {5, 2100000}, /* ClockRate, kHz */
        {16, 0},     /* Integrated */
        {23, 9},     /* ComputeCapabilityMajor */
        {24, 1},     /* ManagedMemory */
        {56, 1024},  /* MaxThreadsPerBlock */
        {60, 1300000}, /* MemoryClockRate, kHz */
        {61, 4},     /* ComputeCapabilityMinor */
        {63, 304},   /* MultiprocessorCount */
        {65, 0},     /* PageableMemoryAccess */
        {68, 0},     /* PciDeviceId */
        {69, 0},     /* PciDomainId */
        {74, 65536}, /* MaxSharedMemoryPerBlock */
        {83, 2147483647}, /* TotalConstantMemory */
        {85, 1},     /* UnifiedAddressing */
        {87, 64},    /* WarpSize */
        {88, 1},     /* MemoryPoolsSupported */
        {89, 1},     /* VirtualMemoryManagementSupported */
        {90, 1},     /* HostRegisterSupported */
        {91, 1},     /* MemoryPoolSupportedHandleTypes: POSIX descriptors */
        {93, 1},     /* DmaBufSupported */
        {10013, 1},  /* CanUseStreamWaitValue: of all devices, according to ROCm's documentation */
    };
    *known = true;
    if (number == 67) return 0xc3 + device; /* PciBusId */
    if (number == 95) return gis_fabric_usable(); /* HandleTypeFabricSupported */
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].number == number) return table[i].value;
    *known = false;
    return 0;
}

HIP(hipDeviceGetAttribute, (int *value, int number, int device), (value, number, device)) {
    ENTER(hipDeviceGetAttribute);
    NEED_DEVICE(device);
    NEED(value);
    if (gis_overridden(device, number, value)) return hipSuccess;
    bool known;
    int found = attribute(number, device, &known);
    NEED(known);
    *value = found;
    return hipSuccess;
}

HIP(hipGetDevicePropertiesR0600, (void *properties, int device), (properties, device)) {
    ENTER(hipGetDeviceProperties);
    NEED_DEVICE(device);
    NEED(properties);
    memset(properties, 0, HIP_PROPERTIES_BYTES);
    hip_properties *it = properties;
    snprintf(it->name, sizeof it->name, "Simulated AMD GPU %d", device);
    write_uuid(it->uuid, device);
    if (gis_windows) {
        memcpy(it->luid, "simluid", 7);
        it->luid[7] = (char)('0' + device);
        it->luid_mask = 1;
    }
    it->total = gis_devices[device].total;
    return hipSuccess;
}

HIP(hipDeviceCanAccessPeer, (int *can, int device, int peer), (can, device, peer)) {
    ENTER(hipDeviceCanAccessPeer);
    NEED_DEVICE(device);
    NEED_DEVICE(peer);
    NEED(can);
    *can = gis_can_peer(device, peer);
    return hipSuccess;
}

HIP(hipDeviceEnablePeerAccess, (int peer, uint32_t flags), (peer, flags)) {
    ENTER(hipDeviceEnablePeerAccess);
    NEED_DEVICE(peer);
    NEED(!flags && peer != current);
    gis_context *context = hip_context();
    if (!gis_can_peer(current, peer)) return gis_code(GIS_PEER_UNSUPPORTED);
    if (context->peers & 1u << peer) return hipErrorPeerAccessAlreadyEnabled;
    context->peers |= 1u << peer;
    return hipSuccess;
}

static gis_status synchronize(void *context) { return gis_context_synchronize(context); }

HIP(hipDeviceSynchronize, (void), ()) {
    ENTER(hipDeviceSynchronize);
    TRY(gis_unsafe_in_any()); /* CLR, hip_internal.hpp:225 */
    return hip_alone(synchronize, hip_context());
}
