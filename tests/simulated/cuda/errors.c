/* Error codes: the core's in CUDA's numbers, and CUDA's names. */
#include "cuda.h"

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

result cuda_code(gis_status status) { return status >= 0 ? status : codes[-status]; }

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no device"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping failed"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "no peer access between these devices"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "operating system call failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "object is in an illegal state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access is not enabled"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "host memory is already registered"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host memory is not registered"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "illegal instruction"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "driver and library do not fit together"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture was invalidated by an earlier error"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "two captures would be merged"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun on this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "the capture has work that was not joined"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "a dependency crosses the border of the capture"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "an implicit dependency on a capturing stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "the event was last recorded in a capture"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture was begun by another thread"},
    {909, "CUDA_ERROR_TIMEOUT", "time-out"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

#define COUNT (sizeof errors / sizeof *errors)

const char *cuda_error_name(int code) {
    for (size_t i = 0; i < COUNT; i++)
        if (errors[i].code == code) return errors[i].name;
    return NULL;
}

const char *cuda_error_text(int code) {
    for (size_t i = 0; i < COUNT; i++)
        if (errors[i].code == code) return errors[i].text;
    return NULL;
}
