/* Error codes: the core's in HIP's numbers, which are mostly CUDA's, and HIP's names. */
#include "hip.h"

static const int codes[] = {
    [-GIS_INVALID_VALUE] = 1,
    [-GIS_INVALID_HANDLE] = 400,
    [-GIS_INVALID_CONTEXT] = 201,
    [-GIS_INVALID_DEVICE] = 101,
    [-GIS_OUT_OF_MEMORY] = 2,
    [-GIS_NOT_SUPPORTED] = 801,
    [-GIS_UNKNOWN] = 999,
    [-GIS_NOT_READY] = 600,
    [-GIS_NOT_INITIALIZED] = 3,
    [-GIS_ILLEGAL_ADDRESS] = 700,
    [-GIS_ILLEGAL_STATE] = 401,
    [-GIS_CAPTURE_UNSUPPORTED] = 900,
    [-GIS_CAPTURE_INVALIDATED] = 901,
    [-GIS_CAPTURE_MERGE] = 902,
    [-GIS_CAPTURE_UNMATCHED] = 903,
    [-GIS_CAPTURE_UNJOINED] = 904,
    [-GIS_CAPTURE_ISOLATION] = 905,
    [-GIS_CAPTURE_IMPLICIT] = 906,
    [-GIS_CAPTURED_EVENT] = 907,
    [-GIS_CAPTURE_WRONG_THREAD] = 908,
    [-GIS_PEER_ALREADY_ENABLED] = 704,
    [-GIS_PEER_NOT_ENABLED] = 705,
    [-GIS_HOST_ALREADY_REGISTERED] = 712,
    [-GIS_HOST_NOT_REGISTERED] = 713,
};

hip_error hip_code(gis_status status) { return status >= 0 ? status : codes[-status]; }

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {3, "hipErrorNotInitialized", "initialization error"},
    {4, "hipErrorDeinitialized", "driver shutting down"},
    {100, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {401, "hipErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "hipErrorNotFound", "named symbol not found"},
    {600, "hipErrorNotReady", "device not ready"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {705, "hipErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {709, "hipErrorContextIsDestroyed", "context is destroyed"},
    {712, "hipErrorHostMemoryAlreadyRegistered", "part or all of the memory is registered already"},
    {713, "hipErrorHostMemoryNotRegistered", "the pointer is not registered"},
    {719, "hipErrorLaunchFailure", "unspecified launch failure"},
    {801, "hipErrorNotSupported", "operation not supported"},
    {900, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "hipErrorStreamCaptureInvalidated", "the capture was invalidated by an earlier error"},
    {902, "hipErrorStreamCaptureMerge", "two captures would be merged"},
    {903, "hipErrorStreamCaptureUnmatched", "the capture was not begun on this stream"},
    {904, "hipErrorStreamCaptureUnjoined", "the capture has work that was not joined"},
    {905, "hipErrorStreamCaptureIsolation", "a dependency crosses the border of the capture"},
    {906, "hipErrorStreamCaptureImplicit", "an implicit dependency on a capturing stream"},
    {907, "hipErrorCapturedEvent", "the event was last recorded in a capture"},
    {908, "hipErrorStreamCaptureWrongThread", "the capture was begun by another thread"},
    {999, "hipErrorUnknown", "unknown error"},
};

#define COUNT (sizeof errors / sizeof *errors)

const char *hip_error_name(int code) {
    for (size_t i = 0; i < COUNT; i++)
        if (errors[i].code == code) return errors[i].name;
    return NULL;
}

const char *hip_error_text(int code) {
    for (size_t i = 0; i < COUNT; i++)
        if (errors[i].code == code) return errors[i].text;
    return NULL;
}
