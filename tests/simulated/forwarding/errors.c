/*
 * Error codes. HIP's numbers are CUDA's wherever both have the error; what follows is what HIP has, and what becomes of
 * the rest.
 */
#include "forwarding.h"

static const struct {
    hip_error code;
    const char *name;
    bool cuda; /* the same number means the same to the CUDA driver */
} errors[] = {
    {0, "hipSuccess", true},
    {1, "hipErrorInvalidValue", true},
    {2, "hipErrorOutOfMemory", true},
    {3, "hipErrorNotInitialized", true},
    {4, "hipErrorDeinitialized", true},
    {5, "hipErrorProfilerDisabled", true},
    {6, "hipErrorProfilerNotInitialized", true},
    {7, "hipErrorProfilerAlreadyStarted", true},
    {8, "hipErrorProfilerAlreadyStopped", true},
    {9, "hipErrorInvalidConfiguration", false},
    {12, "hipErrorInvalidPitchValue", false},
    {13, "hipErrorInvalidSymbol", false},
    {17, "hipErrorInvalidDevicePointer", false},
    {21, "hipErrorInvalidMemcpyDirection", false},
    {35, "hipErrorInsufficientDriver", false},
    {52, "hipErrorMissingConfiguration", false},
    {53, "hipErrorPriorLaunchFailure", false},
    {98, "hipErrorInvalidDeviceFunction", false},
    {100, "hipErrorNoDevice", true},
    {101, "hipErrorInvalidDevice", true},
    {200, "hipErrorInvalidImage", true},
    {201, "hipErrorInvalidContext", true},
    {202, "hipErrorContextAlreadyCurrent", true},
    {205, "hipErrorMapFailed", true},
    {206, "hipErrorUnmapFailed", true},
    {207, "hipErrorArrayIsMapped", true},
    {208, "hipErrorAlreadyMapped", true},
    {209, "hipErrorNoBinaryForGpu", true},
    {210, "hipErrorAlreadyAcquired", true},
    {211, "hipErrorNotMapped", true},
    {212, "hipErrorNotMappedAsArray", true},
    {213, "hipErrorNotMappedAsPointer", true},
    {214, "hipErrorECCNotCorrectable", true},
    {215, "hipErrorUnsupportedLimit", true},
    {216, "hipErrorContextAlreadyInUse", true},
    {217, "hipErrorPeerAccessUnsupported", true},
    {218, "hipErrorInvalidKernelFile", true},
    {219, "hipErrorInvalidGraphicsContext", true},
    {300, "hipErrorInvalidSource", true},
    {301, "hipErrorFileNotFound", true},
    {302, "hipErrorSharedObjectSymbolNotFound", true},
    {303, "hipErrorSharedObjectInitFailed", true},
    {304, "hipErrorOperatingSystem", true},
    {400, "hipErrorInvalidHandle", true},
    {401, "hipErrorIllegalState", true},
    {500, "hipErrorNotFound", true},
    {600, "hipErrorNotReady", true},
    {700, "hipErrorIllegalAddress", true},
    {701, "hipErrorLaunchOutOfResources", true},
    {702, "hipErrorLaunchTimeOut", true},
    {704, "hipErrorPeerAccessAlreadyEnabled", true},
    {705, "hipErrorPeerAccessNotEnabled", true},
    {708, "hipErrorSetOnActiveProcess", true},
    {709, "hipErrorContextIsDestroyed", true},
    {710, "hipErrorAssert", true},
    {712, "hipErrorHostMemoryAlreadyRegistered", true},
    {713, "hipErrorHostMemoryNotRegistered", true},
    {719, "hipErrorLaunchFailure", true},
    {720, "hipErrorCooperativeLaunchTooLarge", true},
    {801, "hipErrorNotSupported", true},
    {900, "hipErrorStreamCaptureUnsupported", true},
    {901, "hipErrorStreamCaptureInvalidated", true},
    {902, "hipErrorStreamCaptureMerge", true},
    {903, "hipErrorStreamCaptureUnmatched", true},
    {904, "hipErrorStreamCaptureUnjoined", true},
    {905, "hipErrorStreamCaptureIsolation", true},
    {906, "hipErrorStreamCaptureImplicit", true},
    {907, "hipErrorCapturedEvent", true},
    {908, "hipErrorStreamCaptureWrongThread", true},
    {910, "hipErrorGraphExecUpdateFailure", true},
    {911, "hipErrorInvalidChannelDescriptor", false}, /* CUDA: an asynchronous error of another device */
    {912, "hipErrorInvalidTexture", false},           /* CUDA: the size of a cluster */
    {999, "hipErrorUnknown", true},
    {1052, "hipErrorRuntimeMemory", false},
    {1053, "hipErrorRuntimeOther", false},
};

const char *gfw_error_name(hip_error code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return NULL;
}

hip_error gfw_code(cuda_error code) {
    if (code == 0) return hipSuccess;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code && errors[i].cuda) return code;
    switch (code) {
    case 34:  /* the driver's stub */
    case 803: /* library and kernel module do not fit */
    case 804:
        return hipErrorInsufficientDriver;
    case 714: /* what a kernel may do wrong: the stack, an instruction, an alignment, an address space, its counter */
    case 715:
    case 716:
    case 717:
    case 718:
        return hipErrorLaunchFailure;
    default:
        return hipErrorUnknown;
    }
}
