/*
 * The CUDA driver beneath: finding it, its contexts, its errors; versions, devices and their attributes.
 */
#define _GNU_SOURCE
#include "forwarding.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* For tests, to tell this library from AMD's and from the simulated one. */
GFW_EXPORT const int gpuinterop_forwarding_hip = 1;

#define CUDA_VERSION 12000
#define HIP_VERSION 70100000

struct gfw_cuda cuda;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static hip_error loaded = hipErrorInsufficientDriver;
static int device_count;
static int devices[GFW_MAX_DEVICES];
static void *primary[GFW_MAX_DEVICES];

_Thread_local int gfw_device;
static _Thread_local hip_error last_error;

/* -- loading ------------------------------------------------------------------------------------------------------- */

typedef cuda_error (*find_function)(const char *name, void **function, int version, uint64_t flags, int *status);

static bool find_all(find_function find) {
    void *found;
#define FIND(NAME, ARGUMENTS)                                          \
    found = NULL;                                                      \
    if (find(#NAME, &found, CUDA_VERSION, 0, NULL) || !found) {        \
        fprintf(stderr, "libamdhip64 (forwarding): the CUDA driver has no %s\n", #NAME); \
        return false;                                                  \
    }                                                                  \
    memcpy(&cuda.NAME, &found, sizeof found);
    CUDA_FUNCTIONS(FIND)
#undef FIND
    return true;
}

static void after_fork(void) { pthread_mutex_init(&lock, NULL); }

static void load(void) {
    pthread_atfork(NULL, NULL, after_fork);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
    find_function find;
    if (!symbol) {
        fprintf(stderr, "libamdhip64 (forwarding): %s\n", dlerror());
        return;
    }
    memcpy(&find, &symbol, sizeof find);
    if (!find_all(find)) return;
    cuda_error code = cuda.cuInit(0);
    if (!code) code = cuda.cuDeviceGetCount(&device_count);
    if (device_count > GFW_MAX_DEVICES) device_count = GFW_MAX_DEVICES;
    for (int i = 0; !code && i < device_count; i++) code = cuda.cuDeviceGet(&devices[i], i);
    loaded = !code && !device_count ? hipErrorNoDevice : gfw_code(code);
}

hip_error gfw_ready(void) {
    pthread_once(&once, load);
    return loaded;
}

int gfw_device_count(void) { return device_count; }
bool gfw_is_device(int ordinal) { return ordinal >= 0 && ordinal < device_count; }
int gfw_cuda_device(int ordinal) { return devices[ordinal]; }

/* The file that the CUDA driver came from, or "": for tests, to show which one it is. */
GFW_EXPORT const char *gfw_driver(void);
GFW_EXPORT const char *gfw_driver(void) {
    Dl_info info;
    void *address;
    if (gfw_ready() == hipErrorInsufficientDriver) return "";
    memcpy(&address, &cuda.cuInit, sizeof address);
    return dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

/* Retained when the device is first used, and kept: HIP has no contexts that a program would end. */
hip_error gfw_context(int device, void **context) {
    cuda_error code = 0;
    if (!gfw_is_device(device)) return hipErrorInvalidDevice;
    *context = __atomic_load_n(&primary[device], __ATOMIC_ACQUIRE);
    if (*context) return hipSuccess;
    pthread_mutex_lock(&lock);
    if (!primary[device]) {
        void *made;
        code = cuda.cuDevicePrimaryCtxRetain(&made, devices[device]);
        if (!code) __atomic_store_n(&primary[device], made, __ATOMIC_RELEASE);
    }
    *context = primary[device];
    pthread_mutex_unlock(&lock);
    return gfw_code(code);
}

/*
 * A thread that has no context gets the device's for good, as the CUDA runtime does it. Where somebody else's is
 * current (the process may use CUDA as well), it is there again after the call.
 */
hip_error gfw_enter(gfw_scope *scope, int device) {
    void *context, *now;
    READY;
    TRY(gfw_context(device, &context));
    CUDA(cuda.cuCtxGetCurrent(&now));
    if (now == context) return hipSuccess;
    if (!now) {
        CUDA(cuda.cuCtxSetCurrent(context));
        return hipSuccess;
    }
    CUDA(cuda.cuCtxPushCurrent(context));
    scope->pushed = true;
    return hipSuccess;
}

void gfw_leave(gfw_scope *scope) {
    void *popped;
    if (scope->pushed) cuda.cuCtxPopCurrent(&popped);
}

/* -- calls and errors ---------------------------------------------------------------------------------------------- */

static gfw_count *counts;

void gfw_called(gfw_count *count) {
    __atomic_add_fetch(&count->calls, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&count->known, __ATOMIC_ACQUIRE)) return;
    pthread_mutex_lock(&lock);
    if (!count->known) {
        count->next = counts;
        counts = count;
        __atomic_store_n(&count->known, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
}

/* How often a function of HIP was called in this process. */
GFW_EXPORT uint64_t gfw_calls(const char *name);
GFW_EXPORT uint64_t gfw_calls(const char *name) {
    uint64_t found = 0;
    pthread_mutex_lock(&lock);
    for (gfw_count *count = counts; count; count = count->next)
        if (!strcmp(count->name, name)) found = __atomic_load_n(&count->calls, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return found;
}

/* From 7.0 on success and hipErrorNotReady leave the last error as it was. */
hip_error gfw_note(hip_error code) {
    if (code && code != hipErrorNotReady) last_error = code;
    return code;
}

GFW_EXPORT hip_error hipGetLastError(void);
GFW_EXPORT hip_error hipGetLastError(void) {
    static gfw_count count = {.name = "hipGetLastError"};
    hip_error code = last_error;
    gfw_called(&count);
    last_error = hipSuccess;
    return code;
}

GFW_EXPORT hip_error hipPeekAtLastError(void);
GFW_EXPORT hip_error hipPeekAtLastError(void) {
    static gfw_count count = {.name = "hipPeekAtLastError"};
    gfw_called(&count);
    return last_error;
}

/* The name, for want of a driver that would have a text. */
static const char *text_of(hip_error code) {
    const char *text = NULL;
    const char *name = gfw_error_name(code);
    if (!name) return "unrecognized error code";
    if (gfw_ready() != hipErrorInsufficientDriver && gfw_code(code) == code) cuda.cuGetErrorString(code, &text);
    return text ? text : name;
}

GFW_EXPORT const char *hipGetErrorName(hip_error code);
GFW_EXPORT const char *hipGetErrorName(hip_error code) {
    const char *name = gfw_error_name(code);
    return name ? name : "hipErrorUnknown";
}

GFW_EXPORT const char *hipGetErrorString(hip_error code);
GFW_EXPORT const char *hipGetErrorString(hip_error code) { return text_of(code); }

/* -- versions ------------------------------------------------------------------------------------------------------ */

/* Which HIP this is taken for: a question that must have an answer before anything else is called. */
int gfw_version(void) {
    const char *text = getenv("GPUINTEROP_SIM_HIP_VERSION");
    int version = text ? atoi(text) : 0;
    return version > 0 ? version : HIP_VERSION;
}

HIP_CALL(hipRuntimeGetVersion, (int *version), (version)) {
    NEED(version);
    *version = gfw_version();
    return hipSuccess;
}

HIP_CALL(hipDriverGetVersion, (int *version), (version)) {
    NEED(version);
    *version = gfw_version();
    return hipSuccess;
}

HIP_CALL(hipInit, (uint32_t flags), (flags)) {
    NEED(!flags);
    return gfw_ready();
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

#define NEED_DEVICE(ORDINAL) \
    READY;                   \
    if (!gfw_is_device(ORDINAL)) return hipErrorInvalidDevice

HIP_CALL(hipGetDeviceCount, (int *count), (count)) {
    NEED(count);
    *count = 0;
    READY;
    *count = device_count;
    return hipSuccess;
}

HIP_CALL(hipGetDevice, (int *device), (device)) {
    NEED(device);
    READY;
    *device = gfw_device;
    return hipSuccess;
}

HIP_CALL(hipSetDevice, (int device), (device)) {
    void *context;
    NEED_DEVICE(device);
    TRY(gfw_context(device, &context));
    CUDA(cuda.cuCtxSetCurrent(context));
    gfw_device = device;
    return hipSuccess;
}

/* Whatever prints the name says what it ran on. */
#define OVER " (HIP over CUDA)"

static hip_error name_of(char *name, int size, int device) {
    CUDA(cuda.cuDeviceGetName(name, size, devices[device]));
    size_t length = strlen(name);
    if (length + sizeof OVER <= (size_t)size) strcpy(name + length, OVER);
    return hipSuccess;
}

HIP_CALL(hipDeviceGetName, (char *name, int size, int device), (name, size, device)) {
    NEED(name && size > 0);
    NEED_DEVICE(device);
    return name_of(name, size, device);
}

HIP_CALL(hipDeviceGetPCIBusId, (char *text, int size, int device), (text, size, device)) {
    NEED(text && size > 0);
    NEED_DEVICE(device);
    CUDA(cuda.cuDeviceGetPCIBusId(text, size, devices[device]));
    for (char *at = text; *at; at++) *at = (char)tolower((unsigned char)*at);
    return hipSuccess;
}

/* CUDA's number of an attribute, by HIP's. Fabric handles (95) are left out: they need a channel that only CUDA's users
   know of, so this runtime has none. */
static const struct {
    uint16_t hip, cuda;
} attributes[] = {
    {0, 32},   {1, 109},  {2, 40},   {3, 19},   {4, 91},   {5, 13},   {6, 20},    {7, 90},   {8, 31},   {9, 89},
    {10, 95},  {12, 15},  {13, 101}, {14, 79},  {15, 86},  {16, 18},  {17, 84},   {18, 17},  {19, 38},  {20, 80},
    {23, 75},  {24, 83},  {25, 106}, {26, 2},   {27, 3},   {28, 4},   {29, 5},    {30, 6},   {31, 7},   {56, 1},
    {57, 39},  {58, 11},  {59, 37},  {60, 36},  {61, 76},  {62, 85},  {63, 16},   {65, 88},  {66, 100}, {67, 33},
    {68, 34},  {69, 50},  {70, 108}, {71, 12},  {72, 82},  {73, 111}, {74, 8},    {75, 97},  {76, 81},  {77, 87},
    {78, 78},  {79, 30},  {80, 35},  {81, 14},  {82, 51},  {83, 9},   {85, 41},   {87, 10},  {88, 115}, {89, 102},
    {90, 99},  {91, 119}, {92, 134}, {93, 124}, {94, 110}, {10013, 122},
};

static hip_error attribute(int device, uint32_t number, int *value) {
    if (number == 95) {
        *value = 0;
        return hipSuccess;
    }
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (attributes[i].hip != number) continue;
        CUDA(cuda.cuDeviceGetAttribute(value, attributes[i].cuda, devices[device]));
        return hipSuccess;
    }
    return hipErrorInvalidValue;
}

HIP_CALL(hipDeviceGetAttribute, (int *value, uint32_t number, int device), (value, number, device)) {
    NEED(value);
    NEED_DEVICE(device);
    return attribute(device, number, value);
}

HIP_CALL(hipDeviceCanAccessPeer, (int *can, int device, int peer), (can, device, peer)) {
    NEED(can);
    NEED_DEVICE(device);
    NEED_DEVICE(peer);
    CUDA(cuda.cuDeviceCanAccessPeer(can, devices[device], devices[peer]));
    return hipSuccess;
}

HIP_CALL(hipDeviceSynchronize, (void), ()) {
    ON_CURRENT;
    CUDA(cuda.cuCtxSynchronize());
    return hipSuccess;
}

