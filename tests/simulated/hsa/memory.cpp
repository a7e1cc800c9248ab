/* Memory of the pools, pinned memory of the program, and what is known of an address. */
#include "stand_in.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

std::recursive_mutex memory_lock;
std::atomic<size_t> vram_used{0};
static std::map<uintptr_t, Region> regions;
static std::map<uintptr_t, Region>::iterator find(const void *p) {
    auto it = regions.upper_bound((uintptr_t)p);
    if (it == regions.begin())
        return regions.end();
    --it;
    return (uintptr_t)p < it->first + it->second.size ? it : regions.end();
}

void add_region(void *at, const Region &region) { regions[(uintptr_t)at] = region; }
Region *region_at(void *at) {
    auto it = regions.find((uintptr_t)at);
    return it == regions.end() ? nullptr : &it->second;
}
Region *region_of(const void *p, uintptr_t *base) {
    auto it = find(p);
    if (it == regions.end())
        return nullptr;
    *base = it->first;
    return &it->second;
}
void remove_region(void *at) { regions.erase((uintptr_t)at); }
std::string vram_name(const void *at) {
    char name[64];
    snprintf(name, sizeof name, "stand-in-vram %p", at);
    return name;
}
int64_t count_regions(hsa_amd_pointer_type_t type) {
    return std::count_if(regions.begin(), regions.end(), [=](auto &one) { return one.second.type == type; });
}

extern "C" {

hsa_status_t hsa_amd_memory_pool_allocate(hsa_amd_memory_pool_t pool, size_t size, uint32_t, void **ptr) {
    if (!size || !ptr)
        return BAD;
    FAIL_IF_ASKED;
    bool vram = is_vram(pool.handle);
    if (vram && vram_used + round_up(size) > VRAM_SIZE)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    int fd = -1;
    if (vram) { // another process can be given it; the memfd's name is the address
        fd = memfd_create(vram_name(p).c_str(), MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, size) ||
            mmap(p, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            close(fd);
            munmap(p, size);
            return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
        }
        vram_used += round_up(size);
    }
    MemoryLock held(memory_lock);
    regions[(uintptr_t)p] =
        Region{size, HSA_EXT_POINTER_TYPE_HSA, owner_of(pool.handle), vram || pool.handle == COARSE ? 4u : 2u, 0, fd};
    *ptr = p;
    say("allocate pool %lu: %p + 0x%zx", pool.handle, p, size);
    return OK;
}
hsa_status_t hsa_amd_memory_pool_free(void *ptr) {
    if (!ptr)
        return OK;
    MemoryLock held(memory_lock);
    auto it = regions.find((uintptr_t)ptr);
    say("free %p%s", ptr, it == regions.end() ? ": unknown" : "");
    if (it == regions.end())
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    if (it->second.type == HSA_EXT_POINTER_TYPE_IPC) // that is detached
        return BAD;
    if (it->second.fd >= 0) {
        vram_used -= round_up(it->second.size);
        close(it->second.fd);
    }
    munmap(ptr, it->second.size);
    regions.erase(it);
    return OK;
}
hsa_status_t hsa_amd_agents_allow_access(uint32_t, const hsa_agent_t *, const uint32_t *, const void *) { return OK; }
hsa_status_t hsa_amd_memory_lock_to_pool(void *host, size_t size, hsa_agent_t *, int, hsa_amd_memory_pool_t, uint32_t,
                                         void **agent) {
    FAIL_IF_ASKED;
    // The pages must be there, as the kernel's pinning asks.
    uintptr_t first = (uintptr_t)host / GRANULE * GRANULE, end = round_up((uintptr_t)host + size);
    std::vector<unsigned char> pages((end - first) / GRANULE);
    if (mincore((void *)first, end - first, pages.data())) {
        say("lock %p: not mapped", host);
        return HSA_STATUS_ERROR;
    }
    MemoryLock held(memory_lock);
    auto it = regions.find((uintptr_t)host);
    if (it != regions.end())
        ++it->second.locks;
    else
        regions[(uintptr_t)host] = Region{size, HSA_EXT_POINTER_TYPE_LOCKED, CPU, 2, 1};
    *agent = host;
    say("lock %p + 0x%zx", host, size);
    return OK;
}
hsa_status_t hsa_amd_memory_unlock(void *host) {
    MemoryLock held(memory_lock);
    auto it = regions.find((uintptr_t)host);
    say("unlock %p", host);
    if (it == regions.end())
        return BAD;
    if (--it->second.locks <= 0 && it->second.type == HSA_EXT_POINTER_TYPE_LOCKED)
        regions.erase(it);
    return OK;
}
hsa_status_t hsa_memory_register(void *, size_t) { return OK; }
hsa_status_t hsa_memory_deregister(void *, size_t) { return OK; }
hsa_status_t hsa_memory_copy(void *to, const void *from, size_t size) {
    memcpy(to, from, size);
    return OK;
}
hsa_status_t hsa_amd_pointer_info(const void *ptr, hsa_amd_pointer_info_t *info, void *(*)(size_t), uint32_t *count,
                                  hsa_agent_t **list) {
    MemoryLock held(memory_lock);
    auto it = find(ptr);
    uint32_t size = info->size;
    memset(info, 0, size);
    info->size = size;
    if (count)
        *count = 0;
    if (list)
        *list = nullptr;
    if (it == regions.end()) {
        info->type = HSA_EXT_POINTER_TYPE_UNKNOWN;
        return OK;
    }
    info->type = it->second.type;
    info->agentBaseAddress = info->hostBaseAddress = (void *)it->first;
    info->sizeInBytes = it->second.size;
    info->agentOwner.handle = it->second.agent;
    info->global_flags = it->second.flags;
    return OK;
}
}
