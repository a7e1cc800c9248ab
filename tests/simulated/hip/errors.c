/* HIP's names and texts of its error codes. */
#include "hip.h"

static const gis_error errors[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {3, "hipErrorNotInitialized", "initialization error"},
    {4, "hipErrorDeinitialized", "driver shutting down"},
    {100, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {217, "hipErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
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

static const gis_error *find(int code) { return gis_error_of(errors, sizeof errors / sizeof *errors, code); }

const char *hip_error_name(int code) {
    const gis_error *found = find(code);
    return found ? found->name : NULL;
}

const char *hip_error_text(int code) {
    const gis_error *found = find(code);
    return found ? found->text : NULL;
}
