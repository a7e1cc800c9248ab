/* What tests ask of the stand-in: faults, counts, a log; and the symbol by which it is known for one. */
#include "stand_in.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <sched.h>

#define CONTROL extern "C" __attribute__((visibility("default")))

CONTROL const int gpuinterop_stand_in_device;
const int gpuinterop_stand_in_device = 1;

const char *option(const char *name) {
    const char *value = getenv((std::string("GPUINTEROP_STANDIN_") + name).c_str());
    return value && *value ? value : nullptr;
}

void say(const char *format, ...) {
    static const bool logs = option("LOG");
    if (!logs)
        return;
    va_list list;
    va_start(list, format);
    flockfile(stderr);
    fputs("[stand-in] ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    funlockfile(stderr);
    va_end(list);
}

uint64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

void nap(unsigned &turns) {
    if (turns++ < 50) {
        sched_yield();
        return;
    }
    timespec time{0, turns < 500 ? 20000 : 100000};
    nanosleep(&time, nullptr);
}

/* -- faults -------------------------------------------------------------------------------------------------------- */

struct Fault {
    uint64_t after; // calls that still succeed
    int status;
};
static std::mutex faults_lock;
static std::map<std::string, Fault> faults;

hsa_status_t fault(const char *call) {
    std::lock_guard<std::mutex> held(faults_lock);
    auto it = faults.find(call);
    if (it == faults.end() || it->second.after--)
        return OK;
    hsa_status_t status = (hsa_status_t)it->second.status;
    faults.erase(it);
    say("%s fails with 0x%x, as asked", call, status);
    return status;
}

CONTROL void gpuinterop_stand_in_fail(const char *call, uint64_t nth, int status) {
    std::lock_guard<std::mutex> held(faults_lock);
    faults[call] = Fault{nth - 1, status};
}

CONTROL int gpuinterop_stand_in_clear() {
    std::lock_guard<std::mutex> held(faults_lock);
    int left = (int)faults.size();
    faults.clear();
    return left;
}

/* -- counts -------------------------------------------------------------------------------------------------------- */

CONTROL int64_t gpuinterop_stand_in_live(const char *kind) {
    const std::string name = kind;
    MemoryLock held(memory_lock);
    if (name == "allocation")
        return count_regions(HSA_EXT_POINTER_TYPE_HSA) - count_mappings();
    if (name == "registration")
        return count_regions(HSA_EXT_POINTER_TYPE_LOCKED);
    if (name == "interop_mapping")
        return count_regions(HSA_EXT_POINTER_TYPE_GRAPHICS);
    if (name == "ipc_mapping")
        return count_regions(HSA_EXT_POINTER_TYPE_IPC);
    if (name == "reservation")
        return count_reservations();
    if (name == "handle")
        return count_handles();
    if (name == "mapping")
        return count_mappings();
    return name == "queue" ? count_queues() : -1;
}
