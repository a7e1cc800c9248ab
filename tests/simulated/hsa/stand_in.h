/*
 * A stand-in for AMD's HSA runtime (libhsa-runtime64) on a machine without an AMD GPU: AMD's HIP runtime runs on it. A
 * device is this process's own CPU: its memory is memfds and anonymous pages, a queue is a thread that reads AQL
 * packets, and the kernels that AMD's runtime starts for copies, fills and stream words are known by their names.
 *
 * The types are those of AMD's public headers. What nothing here calls says so where it is called (absent.cpp).
 */
#ifndef STAND_IN_H
#define STAND_IN_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include <hsa/amd_hsa_queue.h>
#include <hsa/amd_hsa_signal.h>
#include <hsa/hsa.h>
#include <hsa/hsa_ext_amd.h>

#define OK HSA_STATUS_SUCCESS
#define BAD HSA_STATUS_ERROR_INVALID_ARGUMENT

const size_t VRAM_SIZE = 16ull << 30, GRANULE = 4096, RECOMMENDED_GRANULE = 2u << 20;

enum { CPU = 1, GPU0 = 2 };                                      // agents: device n is GPU0 + n
enum { FINE = 1, KERNARG = 2, COARSE = 3, VRAM = 16, LDS = 17 }; // pools: three of the CPU; VRAM + 16 n, LDS + 16 n

inline bool is_vram(uint64_t pool) { return pool >= VRAM && pool % 16 == 0; }
inline uint64_t owner_of(uint64_t pool) { return pool >= VRAM ? GPU0 + (pool - VRAM) / 16 : (uint64_t)CPU; }
inline size_t round_up(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }
std::string isa();

/* control.cpp */
const char *option(const char *name);                                    // of the environment: GPUINTEROP_STANDIN_name
void say(const char *format, ...) __attribute__((format(printf, 1, 2))); // where LOG is asked for
hsa_status_t fault(const char *call);                                    // what this call must fail with, or success
uint64_t now();                                                          // nanoseconds
void nap(unsigned &turns);                                               // between looks, longer each time

#define FAIL_IF_ASKED                                                                                                  \
    if (hsa_status_t asked = fault(__func__))                                                                          \
    return asked

/* memory.cpp: what is known of addresses, by their first; memory_lock guards it and what shared.cpp has. */
struct Region {
    size_t size;
    hsa_amd_pointer_type_t type;
    uint64_t agent;
    uint32_t flags;
    int locks;
    int fd = -1; // what the memory lies in, for other processes
};
extern std::recursive_mutex memory_lock;
typedef std::lock_guard<std::recursive_mutex> MemoryLock;
void add_region(void *at, const Region &region);
Region *region_at(void *at);                       // that begins there, or null
Region *region_of(const void *p, uintptr_t *base); // that it lies in
void remove_region(void *at);
extern std::atomic<size_t> vram_used;
std::string vram_name(const void *at); // of the memfd that is mapped there, for who looks from outside

/* How many there are, for control.cpp. */
int64_t count_regions(hsa_amd_pointer_type_t type);
int64_t count_reservations(), count_handles(), count_mappings(), count_queues();

/* signals.cpp */
amd_signal_t *signal_of(hsa_signal_t signal);
std::atomic<int64_t> &value_of(hsa_signal_t signal);
bool is_met(int64_t value, hsa_signal_condition_t condition, int64_t wanted);
void complete(hsa_signal_t signal, uint64_t start);

#endif
