/* Memory of others, and memory for others: memfds stand for dma-bufs; and the address ranges that it is mapped at. */
#include "stand_in.h"

#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

static std::string target(const std::string &link) {
    char name[256];
    ssize_t n = readlink(link.c_str(), name, sizeof name);
    return std::string(name, n > 0 ? n : 0);
}
static bool shareable(int fd, size_t *size) {
    struct stat s;
    if (fstat(fd, &s))
        return false;
    std::string name = target("/proc/self/fd/" + std::to_string(fd));
    if (!name.compare(0, 8, "/dmabuf:"))
        *size = lseek(fd, 0, SEEK_END);
    else if (!name.compare(0, 7, "/memfd:"))
        *size = s.st_size;
    else
        return false; // the kernel's importer takes amdgpu's own dma-bufs only
    return *size > 0;
}
// The kernel driver's library gives a handle a range of its allocation's size, which AMD's maps rely on, of an aperture
// where no address is (libhsakmt's mem_handle_aperture): the lowest that is free.
static const uint64_t HANDLES = 1ull << 47;
struct Handle {
    int fd;
    size_t size;
    int references, uses;
    uint64_t agent;
    uint64_t id;
};
struct Mapping {
    Handle *handle;
    size_t size;
    uintptr_t reserved;
    std::map<uint64_t, hsa_access_permission_t> allowed;
};
static std::map<uintptr_t, std::pair<size_t, int>> reserved; // size, mappings
static std::map<uintptr_t, Mapping> mapped;
static std::map<uint64_t, Handle *> handles;
static Handle *known(uint64_t id) {
    auto it = handles.find(id);
    return it == handles.end() ? nullptr : it->second;
}
static Handle *add(int fd, size_t size, uint64_t agent) {
    uint64_t id = HANDLES;
    for (auto &one : handles) {
        if (id + size <= one.first)
            break;
        id = one.first + one.second->size;
    }
    vram_used += size;
    return handles[id] = new Handle{fd, size, 1, 0, agent, id};
}
static void drop(Handle *h) {
    if (h->references || h->uses)
        return;
    close(h->fd);
    vram_used -= h->size;
    handles.erase(h->id);
    delete h;
}
int64_t count_reservations() { return (int64_t)reserved.size(); }
int64_t count_handles() { return (int64_t)handles.size(); }
int64_t count_mappings() { return (int64_t)mapped.size(); }

extern "C" {

hsa_status_t hsa_amd_interop_map_buffer(uint32_t, hsa_agent_t *agents, int fd, uint32_t, size_t *size, void **ptr,
                                        size_t *metadata_size, const void **metadata) {
    FAIL_IF_ASKED;
    size_t length;
    if (!shareable(fd, &length)) {
        say("interop map fd %d: refused", fd);
        return HSA_STATUS_ERROR;
    }
    void *p = mmap(nullptr, round_up(length), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    MemoryLock held(memory_lock);
    add_region(p, Region{round_up(length), HSA_EXT_POINTER_TYPE_GRAPHICS, agents[0].handle, 4, 0});
    *size = round_up(length);
    *ptr = p;
    if (metadata_size)
        *metadata_size = 0;
    if (metadata)
        *metadata = nullptr;
    say("interop map fd %d: %p + 0x%zx", fd, p, *size);
    return OK;
}
hsa_status_t hsa_amd_interop_unmap_buffer(void *ptr) {
    MemoryLock held(memory_lock);
    Region *region = region_at(ptr);
    say("interop unmap %p%s", ptr, !region ? ": unknown" : "");
    if (!region || region->type != HSA_EXT_POINTER_TYPE_GRAPHICS)
        return BAD;
    munmap(ptr, region->size);
    remove_region(ptr);
    return OK;
}

// As ROCr's, a handle is a process and an address in it, asked for when it is attached: what lies there by then. Where
// ROCr asks a thread of that process, this looks into /proc: nothing is left behind where a process ends.
struct Shared {
    void *at;
    int process;
    uint32_t agent;
    uint64_t stamp;
};
static_assert(sizeof(Shared) <= sizeof(hsa_amd_ipc_memory_t), "it is to fit");

hsa_status_t hsa_amd_ipc_memory_create(void *ptr, size_t size, hsa_amd_ipc_memory_t *out) {
    FAIL_IF_ASKED;
    const char *legacy = getenv("HSA_ENABLE_IPC_MODE_LEGACY"); // wants calls that only AMD's own kernel driver has
    MemoryLock held(memory_lock);
    Region *region = region_at(ptr);
    if (!region || region->size != size || (legacy && !strcmp(legacy, "1")))
        return BAD;
    struct stat s;
    if (region->fd < 0 || fstat(region->fd, &s)) // the host's, of which there are no dma-bufs, or a mapping
        return HSA_STATUS_ERROR;
    Shared shared{ptr, getpid(), (uint32_t)region->agent, s.st_ino};
    memset(out, 0, sizeof *out);
    memcpy(out, &shared, sizeof shared);
    say("ipc create %p + 0x%zx", ptr, size);
    return OK;
}
hsa_status_t hsa_amd_ipc_memory_attach(const hsa_amd_ipc_memory_t *handle, size_t, uint32_t, const hsa_agent_t *,
                                       void **out) {
    FAIL_IF_ASKED;
    Shared shared;
    memcpy(&shared, handle, sizeof shared);
    const std::string folder = "/proc/" + std::to_string(shared.process) + "/fd/",
                      wanted = "/memfd:" + vram_name(shared.at) + " (deleted)";
    int fd = -1;
    if (DIR *all = opendir(folder.c_str())) {
        while (dirent *one = fd < 0 ? readdir(all) : nullptr)
            if (target(folder + one->d_name) == wanted)
                fd = open((folder + one->d_name).c_str(), O_RDWR | O_CLOEXEC);
        closedir(all);
    }
    struct stat s;
    bool found = fd >= 0 && !fstat(fd, &s);
#if HSA_AMD_INTERFACE_VERSION_MINOR > 6 // 7.1's marks the memory, and tells other memory at the address
    found = found && s.st_ino == shared.stamp;
#endif
    void *p = found ? mmap(nullptr, s.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    say("ipc attach %p of %d: %p", shared.at, shared.process, p);
    if (p == MAP_FAILED)
        return BAD;
    MemoryLock held(memory_lock);
    add_region(p, Region{(size_t)s.st_size, HSA_EXT_POINTER_TYPE_IPC, shared.agent, 4, 0});
    *out = p;
    return OK;
}
hsa_status_t hsa_amd_ipc_memory_detach(void *ptr) {
    MemoryLock held(memory_lock);
    Region *region = region_at(ptr);
    say("ipc detach %p%s", ptr, !region ? ": unknown" : "");
    if (!region || region->type != HSA_EXT_POINTER_TYPE_IPC)
        return BAD;
    munmap(ptr, region->size);
    remove_region(ptr);
    return OK;
}

hsa_status_t hsa_amd_portable_export_dmabuf(const void *ptr, size_t size, int *fd, uint64_t *offset) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    uintptr_t base = 0;
    Region *region = region_of(ptr, &base);
    if (!region || region->fd < 0 || (uintptr_t)ptr + size > base + region->size)
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    *fd = fcntl(region->fd, F_DUPFD_CLOEXEC, 3); // of all of it
    *offset = (uintptr_t)ptr - base;
    say("portable export %p: fd %d", ptr, *fd);
    return *fd < 0 ? HSA_STATUS_ERROR_OUT_OF_RESOURCES : OK;
}

hsa_status_t hsa_amd_vmem_address_reserve_align(void **va, size_t size, uint64_t address, uint64_t alignment, uint64_t) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = MAP_FAILED;
    if (address)
        p = mmap((void *)address, size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    if (p == MAP_FAILED && alignment > GRANULE) { // more than is asked for, and what is before and behind goes back
        p = mmap(nullptr, size + alignment, PROT_NONE, flags, -1, 0);
        if (p != MAP_FAILED) {
            uintptr_t first = (uintptr_t)p, at = (first + alignment - 1) / alignment * alignment;
            munmap(p, at - first);
            munmap((void *)(at + size), first + alignment - at);
            p = (void *)at;
        }
    } else if (p == MAP_FAILED) {
        p = mmap(nullptr, size, PROT_NONE, flags, -1, 0);
    }
    if (p == MAP_FAILED)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    reserved[(uintptr_t)p] = {size, 0};
    *va = p;
    say("reserve %p + 0x%zx", p, size);
    return OK;
}
hsa_status_t hsa_amd_vmem_address_reserve(void **va, size_t size, uint64_t address, uint64_t flags) {
    return hsa_amd_vmem_address_reserve_align(va, size, address, 0, flags);
}
hsa_status_t hsa_amd_vmem_address_free(void *va, size_t size) {
    MemoryLock held(memory_lock);
    auto it = reserved.find((uintptr_t)va);
    if (it == reserved.end())
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    if (it->second.first != size)
        return BAD;
    if (it->second.second)
        return HSA_STATUS_ERROR_RESOURCE_FREE;
    munmap(va, size);
    reserved.erase(it);
    say("unreserve %p", va);
    return OK;
}
hsa_status_t hsa_amd_vmem_handle_create(hsa_amd_memory_pool_t pool, size_t size, hsa_amd_memory_type_t, uint64_t,
                                        hsa_amd_vmem_alloc_handle_t *out) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    if (!size || size % GRANULE)
        return BAD;
    if (vram_used + size > VRAM_SIZE)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    int fd = memfd_create("stand-in-vram", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) {
        close(fd);
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    }
    Handle *h = add(fd, size, owner_of(pool.handle));
    out->handle = h->id;
    say("vmem create 0x%zx: 0x%lx", size, h->id);
    return OK;
}
hsa_status_t hsa_amd_vmem_handle_release(hsa_amd_vmem_alloc_handle_t handle) {
    MemoryLock held(memory_lock);
    Handle *h = known(handle.handle);
    say("vmem release %p%s", (void *)handle.handle, h ? "" : ": unknown");
    if (!h || !h->references)
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    --h->references;
    drop(h);
    return OK;
}
hsa_status_t hsa_amd_vmem_retain_alloc_handle(hsa_amd_vmem_alloc_handle_t *out, void *va) {
    MemoryLock held(memory_lock);
    auto m = mapped.find((uintptr_t)va);
    if (m == mapped.end())
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    ++m->second.handle->references;
    out->handle = m->second.handle->id;
    return OK;
}
hsa_status_t hsa_amd_vmem_map(void *va, size_t size, size_t, hsa_amd_vmem_alloc_handle_t handle, uint64_t) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    uintptr_t at = (uintptr_t)va;
    auto r = reserved.upper_bound(at);
    if (r == reserved.begin() || (--r, at + size > r->first + r->second.first))
        return BAD;
    auto m = mapped.lower_bound(at);
    if (m != mapped.end() && m->first < at + size)
        return BAD;
    if (m != mapped.begin() && (--m, m->first + m->second.size > at))
        return BAD;
    Handle *h = known(handle.handle);
    if (!h)
        return BAD;
    if (size > h->size)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    if (mmap(va, size, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED)
        return HSA_STATUS_ERROR;
    mapped[at] = Mapping{h, size, r->first, {}};
    ++r->second.second;
    ++h->uses;
    add_region(va, Region{size, HSA_EXT_POINTER_TYPE_HSA, h->agent, 4, 0});
    say("vmem map %p + 0x%zx of 0x%lx", va, size, h->id);
    return OK;
}
hsa_status_t hsa_amd_vmem_unmap(void *va, size_t size) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    auto m = mapped.find((uintptr_t)va);
    if (m == mapped.end())
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    if (m->second.size != size)
        return BAD;
    mmap(va, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    --reserved[m->second.reserved].second;
    Handle *h = m->second.handle;
    --h->uses;
    mapped.erase(m);
    remove_region(va);
    drop(h);
    say("vmem unmap %p", va);
    return OK;
}
hsa_status_t hsa_amd_vmem_set_access(void *va, size_t size, const hsa_amd_memory_access_desc_t *desc, size_t count) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    uintptr_t at = (uintptr_t)va, end = at + size;
    std::vector<std::pair<uintptr_t, Mapping *>> found;
    while (at < end) {
        auto m = mapped.find(at);
        if (m == mapped.end()) {
            say("vmem access %p + 0x%zx: not mapped", va, size);
            return HSA_STATUS_ERROR_INVALID_ALLOCATION;
        }
        found.push_back({at, &m->second});
        at += m->second.size;
    }
    for (auto &one : found) {
        int protection = 0;
        for (size_t i = 0; i < count; ++i)
            one.second->allowed[desc[i].agent_handle.handle] = desc[i].permissions;
        for (auto &agent : one.second->allowed)
            protection |= (agent.second & 1 ? PROT_READ : 0) | (agent.second & 2 ? PROT_READ | PROT_WRITE : 0);
        mprotect((void *)one.first, one.second->size, protection);
    }
    say("vmem access %p + 0x%zx: %d", va, size, count ? desc[0].permissions : -1);
    return OK;
}
hsa_status_t hsa_amd_vmem_get_access(void *va, hsa_access_permission_t *perms, hsa_agent_t agent) {
    MemoryLock held(memory_lock);
    auto m = mapped.upper_bound((uintptr_t)va);
    *perms = HSA_ACCESS_PERMISSION_NONE;
    if (m == mapped.begin() || (--m, (uintptr_t)va >= m->first + m->second.size))
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    auto it = m->second.allowed.find(agent.handle);
    if (it != m->second.allowed.end())
        *perms = it->second;
    return OK;
}
hsa_status_t hsa_amd_vmem_export_shareable_handle(int *fd, hsa_amd_vmem_alloc_handle_t handle, uint64_t) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    Handle *h = known(handle.handle);
    *fd = -1;
    if (!h)
        return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    *fd = fcntl(h->fd, F_DUPFD_CLOEXEC, 3);
    say("vmem export 0x%lx: fd %d", h->id, *fd);
    return *fd < 0 ? HSA_STATUS_ERROR_OUT_OF_RESOURCES : OK;
}
hsa_status_t hsa_amd_vmem_import_shareable_handle(int fd, hsa_amd_vmem_alloc_handle_t *out) {
    FAIL_IF_ASKED;
    MemoryLock held(memory_lock);
    size_t size;
    if (!shareable(fd, &size)) {
        say("vmem import fd %d: refused", fd);
        return HSA_STATUS_ERROR_INCOMPATIBLE_ARGUMENTS;
    }
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    Handle *h = add(own, round_up(size), GPU0);
    out->handle = h->id;
    say("vmem import fd %d: 0x%lx + 0x%zx", fd, h->id, h->size);
    return OK;
}
}
