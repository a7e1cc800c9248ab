/* Streams, events, captures, stream memory operations; and the semaphores that HIP does not have on Linux. */
#define _GNU_SOURCE
#include "forwarding.h"

#include <stdlib.h>
#include <string.h>

/* A stream is CUDA's handle; 0, 1 and 2 are the default streams of the current device on both sides. */

HIP_CALL(hipStreamCreateWithPriority, (void **stream, uint32_t flags, int priority), (stream, flags, priority)) {
    NEED(stream && flags <= 1);
    ON_CURRENT;
    CUDA(cuda.cuStreamCreateWithPriority(stream, flags, priority));
    return hipSuccess;
}

HIP_CALL(hipStreamCreateWithFlags, (void **stream, uint32_t flags), (stream, flags)) {
    return hipStreamCreateWithPriority_forwarded(stream, flags, 0);
}

HIP_CALL(hipStreamDestroy, (void *stream), (stream)) {
    if ((uintptr_t)stream <= 2) return hipErrorInvalidHandle;
    ON_CURRENT;
    CUDA(cuda.cuStreamDestroy(stream));
    return hipSuccess;
}

HIP_CALL(hipStreamSynchronize, (void *stream), (stream)) {
    ON_CURRENT;
    CUDA(cuda.cuStreamSynchronize(stream));
    return hipSuccess;
}

HIP_CALL(hipStreamQuery, (void *stream), (stream)) {
    ON_CURRENT;
    CUDA(cuda.cuStreamQuery(stream));
    return hipSuccess;
}

HIP_CALL(hipStreamGetFlags, (void *stream, unsigned *flags), (stream, flags)) {
    ON_CURRENT;
    CUDA(cuda.cuStreamGetFlags(stream, flags));
    return hipSuccess;
}

HIP_CALL(hipStreamGetDevice, (void *stream, int *device), (stream, device)) {
    void *context, *mine;
    NEED(device);
    ON_CURRENT;
    if ((uintptr_t)stream <= 2) {
        *device = gfw_device;
        return hipSuccess;
    }
    CUDA(cuda.cuStreamGetCtx(stream, &context));
    CUDA(cuda.cuCtxPushCurrent(context)); /* of the stream's, whoever made it */
    int found = -1;
    cuda_error code = cuda.cuCtxGetDevice(&found);
    cuda.cuCtxPopCurrent(&mine);
    CUDA(code);
    for (int i = 0; i < gfw_device_count(); i++) {
        if (gfw_cuda_device(i) != found) continue;
        *device = i;
        return hipSuccess;
    }
    return hipErrorInvalidDevice;
}

HIP_CALL(hipStreamWaitEvent, (void *stream, void *event, uint32_t flags), (stream, event, flags)) {
    if (!event) return hipErrorInvalidHandle;
    NEED(flags <= 1);
    ON_CURRENT;
    CUDA(cuda.cuStreamWaitEvent(stream, event, flags));
    return hipSuccess;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

#define EVENT_FLAGS 0x7u /* hipEventBlockingSync, -DisableTiming, -Interprocess: as CUDA's */
/* hipEventDisableSystemFence, -ReleaseToDevice, -ReleaseToSystem: CUDA's events have one kind of fence. */
#define EVENT_FENCES 0xe0000000u

HIP_CALL(hipEventCreateWithFlags, (void **event, uint32_t flags), (event, flags)) {
    NEED(event && !(flags & ~(EVENT_FLAGS | EVENT_FENCES)));
    ON_CURRENT;
    CUDA(cuda.cuEventCreate(event, flags & EVENT_FLAGS));
    return hipSuccess;
}

HIP_CALL(hipEventRecord, (void *event, void *stream), (event, stream)) {
    if (!event) return hipErrorInvalidHandle;
    ON_CURRENT;
    CUDA(cuda.cuEventRecord(event, stream));
    return hipSuccess;
}

HIP_CALL(hipEventQuery, (void *event), (event)) {
    if (!event) return hipErrorInvalidHandle;
    READY;
    CUDA(cuda.cuEventQuery(event));
    return hipSuccess;
}

HIP_CALL(hipEventDestroy, (void *event), (event)) {
    if (!event) return hipErrorInvalidHandle;
    READY;
    CUDA(cuda.cuEventDestroy(event));
    return hipSuccess;
}

/* -- captures: enough for a program to tell the truth about a stream ------------------------------------------------ */

HIP_CALL(hipStreamBeginCapture, (void *stream, uint32_t mode), (stream, mode)) {
    NEED(mode <= 2);
    ON_CURRENT;
    CUDA(cuda.cuStreamBeginCapture(stream, mode));
    return hipSuccess;
}

HIP_CALL(hipStreamEndCapture, (void *stream, void **graph), (stream, graph)) {
    NEED(graph);
    ON_CURRENT;
    CUDA(cuda.cuStreamEndCapture(stream, graph));
    return hipSuccess;
}

HIP_CALL(hipStreamIsCapturing, (void *stream, int *status), (stream, status)) {
    NEED(status);
    ON_CURRENT;
    CUDA(cuda.cuStreamIsCapturing(stream, status));
    return hipSuccess;
}

HIP_CALL(hipThreadExchangeStreamCaptureMode, (uint32_t * mode), (mode)) {
    NEED(mode && *mode <= 2);
    READY;
    CUDA(cuda.cuThreadExchangeStreamCaptureMode(mode));
    return hipSuccess;
}

HIP_CALL(hipGraphDestroy, (void *graph), (graph)) {
    NEED(graph);
    READY;
    CUDA(cuda.cuGraphDestroy(graph));
    return hipSuccess;
}

/* -- stream memory operations -------------------------------------------------------------------------------------- */

static bool waits_on_processor(void) {
    const char *text = getenv("GPU_STREAMOPS_CP_WAIT");
    return text && *text && strcmp(text, "0");
}

static pthread_once_t asked = PTHREAD_ONCE_INIT;
static bool signal_memory_only;
static void ask(void) { signal_memory_only = waits_on_processor(); }

enum { MEMORY_TYPE = 2 };

/* Both: an address that HIP knows (clr: ihipStreamOperation); a number that is aligned. */
static hip_error check_word(const void *word, size_t bytes) {
    uint32_t type;
    NEED(word && !((uintptr_t)word % bytes));
    cuda_error code = cuda.cuPointerGetAttribute(&type, MEMORY_TYPE, (uintptr_t)word);
    if (code == CUDA_INVALID_VALUE) return hipErrorInvalidValue;
    return gfw_code(code);
}

/*
 * hipStreamWaitValueGte, -Eq, -And, -Nor are CUDA's 0 to 3; CUDA compares cyclically, which is the same for values
 * below 2^63. A mask has no counterpart in CUDA. With GPU_STREAMOPS_CP_WAIT=1 a wait takes signal memory only.
 */
static hip_error check_wait(const void *word, size_t bytes, uint32_t flags, bool whole) {
    TRY(check_word(word, bytes));
    NEED(flags <= 3);
    pthread_once(&asked, ask);
    NEED(!signal_memory_only || gfw_is_signal_memory(word));
    return whole ? hipSuccess : hipErrorNotSupported;
}

HIP_CALL(hipStreamWaitValue64, (void *stream, void *word, uint64_t value, uint32_t flags, uint64_t mask),
         (stream, word, value, flags, mask)) {
    ON_CURRENT;
    TRY(check_wait(word, 8, flags, mask == UINT64_MAX));
    CUDA(cuda.cuStreamWaitValue64(stream, (uintptr_t)word, value, flags));
    return hipSuccess;
}

HIP_CALL(hipStreamWriteValue64, (void *stream, void *word, uint64_t value, uint32_t flags),
         (stream, word, value, flags)) {
    (void)flags; /* reserved, and not looked at */
    ON_CURRENT;
    TRY(check_word(word, 8));
    CUDA(cuda.cuStreamWriteValue64(stream, (uintptr_t)word, value, 0));
    return hipSuccess;
}

/* -- external semaphores: none on Linux ---------------------------------------------------------------------------- */

enum { D3D12_FENCE = 4 };

/* Assert-enabled builds up to 7.2 end the process here (ROCm/clr #72), the others say that it is not supported. */
HIP_CALL(hipImportExternalSemaphore, (void **semaphore, const hip_semaphore_desc *desc), (semaphore, desc)) {
    NEED(semaphore && desc && desc->type >= 1 && desc->type <= D3D12_FENCE && desc->handle.fd);
    READY;
    const char *text = getenv("GPUINTEROP_SIM_HIP_ABORT");
    if (text && atoi(text)) abort();
    return hipErrorNotSupported;
}

HIP_CALL(hipDestroyExternalSemaphore, (void *semaphore), (semaphore)) {
    NEED(semaphore);
    return hipSuccess;
}

/* The arguments are checked entry by entry, and then an empty function is called. */
static hip_error do_nothing(void *const *semaphores, const hip_semaphore_params *params, uint32_t count) {
    NEED(semaphores && params);
    READY;
    for (uint32_t i = 0; i < count; i++) NEED(semaphores[i] && !params[i].flags);
    return hipSuccess;
}

HIP_CALL(hipSignalExternalSemaphoresAsync,
         (void *const *semaphores, const hip_semaphore_params *params, uint32_t count, void *stream),
         (semaphores, params, count, stream)) {
    (void)stream;
    return do_nothing(semaphores, params, count);
}

HIP_CALL(hipWaitExternalSemaphoresAsync,
         (void *const *semaphores, const hip_semaphore_params *params, uint32_t count, void *stream),
         (semaphores, params, count, stream)) {
    (void)stream;
    return do_nothing(semaphores, params, count);
}
