/* The core's statuses as numbers. Both vendors use the same numbers: HIP took CUDA's. */
#include "gis.h"

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
    [-GIS_HOST_ALREADY_REGISTERED] = 712,
    [-GIS_HOST_NOT_REGISTERED] = 713,
    [-GIS_NOT_PERMITTED] = 800,
    [-GIS_MULTICAST_FULL] = 47,
    [-GIS_PEER_UNSUPPORTED] = 217,
};

int gis_code(gis_status status) { return status >= 0 ? status : codes[-status]; }

const gis_error *gis_error_of(int code) {
    for (const gis_error *it = gis_errors; it->name; it++)
        if (it->code == code) return it;
    return NULL;
}
