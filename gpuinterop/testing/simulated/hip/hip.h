/*
 * The HIP runtime's entry points. Their work is in ../common; here is what is specific to HIP: structs, numbers, the
 * current device and the last error of each thread, and AMD's differences from what one would expect, each with its
 * source.
 *
 * "CLR" is AMD's runtime (github.com/ROCm/clr, now in rocm-systems). None of this has been seen on AMD hardware.
 */
#ifndef GIS_HIP_H
#define GIS_HIP_H

#include "abi.h"
#include "gis.h"

/* Store a call's result as the thread's last error, and return it. */
hip_error hip_told(hip_error code);

/* The runtime initialises itself in the first call. */
hip_error hip_start(void);
int hip_version(void);

bool hip_is_device(int device);
gis_context *hip_context(void); /* of the thread's current device */
gis_context *hip_context_of(int device);
int hip_current(void);
gis_stream *hip_stream(const void *handle);

/* Make a blocking call, while calls of other threads wait for it. */
hip_error hip_alone(gis_status (*call)(void *), void *argument);

#define HIP(NAME, PARAMETERS, ARGUMENTS)                                        \
    static hip_error NAME##_ PARAMETERS;                                        \
    GIS_EXPORT hip_error NAME PARAMETERS { return hip_told(NAME##_ ARGUMENTS); } \
    static hip_error NAME##_ PARAMETERS

#define BEGIN_CALL(NAME)                                                      \
    static gis_call call_ = {.name = #NAME, .early = true};                   \
    gis_scope scope_ __attribute__((cleanup(gis_leave))) = {.locked = false}; \
    gis_status entered_ = gis_enter(&call_, &scope_);                         \
    if (entered_) return gis_code(entered_)
#define ENTER(NAME)                                          \
    BEGIN_CALL(NAME);                                        \
    for (hip_error code_ = hip_start(); code_;) return code_
#define TRY(CALL)                                       \
    do {                                                \
        gis_status status_ = (CALL);                    \
        if (status_ != GIS_OK) return gis_code(status_); \
    } while (0)
#define NEED(CONDITION) \
    if (!(CONDITION)) return hipErrorInvalidValue
#define NEED_DEVICE(DEVICE) \
    if (!hip_is_device(DEVICE)) return hipErrorInvalidDevice
#define FIND(TYPE, VARIABLE, KIND, HANDLE)           \
    TYPE *VARIABLE = gis_check(KIND, (uint64_t)HANDLE); \
    if (!VARIABLE) return hipErrorInvalidHandle
#define NEED_STREAM(HANDLE)                              \
    gis_stream *stream = hip_stream(HANDLE);             \
    if (!stream) return hipErrorContextIsDestroyed

#endif
