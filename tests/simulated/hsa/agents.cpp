/* The system, its agents and their memory pools: what AMD's runtime asks before it does anything. */
#include "stand_in.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static int devices() {
    const char *given = option("DEVICES");
    return given ? atoi(given) : 1;
}
static const char *gfx() {
    const char *given = option("GFX");
    return given ? given : "gfx1030";
}
std::string isa() {
    std::string name = std::string("amdgcn-amd-amdhsa--") + gfx();
    if (!strcmp(gfx(), "gfx90a") || !strcmp(gfx(), "gfx908"))
        name += ":sramecc+:xnack-";
    if (!strcmp(gfx(), "gfx906"))
        name += ":sramecc-:xnack-";
    return name;
}

extern "C" {

hsa_status_t hsa_init() { return devices() ? OK : HSA_STATUS_ERROR_OUT_OF_RESOURCES; }
hsa_status_t hsa_shut_down() { return OK; }
hsa_status_t hsa_status_string(hsa_status_t status, const char **text) {
    static thread_local char line[40];
    snprintf(line, sizeof line, "stand-in status 0x%x", status);
    *text = line;
    return OK;
}
hsa_status_t hsa_system_get_info(hsa_system_info_t what, void *value) {
    switch ((int)what) {
    case HSA_SYSTEM_INFO_TIMESTAMP_FREQUENCY: *(uint64_t *)value = 1000000000; return OK;
    case HSA_SYSTEM_INFO_TIMESTAMP: *(uint64_t *)value = now(); return OK;
    case HSA_AMD_SYSTEM_INFO_SVM_SUPPORTED: *(bool *)value = false; return OK;
    case HSA_AMD_SYSTEM_INFO_SVM_ACCESSIBLE_BY_DEFAULT: *(bool *)value = false; return OK;
    case HSA_AMD_SYSTEM_INFO_VIRTUAL_MEM_API_SUPPORTED: *(bool *)value = true; return OK;
    case HSA_AMD_SYSTEM_INFO_DMABUF_SUPPORTED: *(bool *)value = true; return OK;
    default: say("system info 0x%x?", what); return BAD;
    }
}
hsa_status_t hsa_system_extension_supported(uint16_t, uint16_t, uint16_t, bool *yes) {
    *yes = false;
    return OK;
}
hsa_status_t hsa_agent_extension_supported(uint16_t, hsa_agent_t, uint16_t, uint16_t, bool *yes) {
    *yes = false;
    return OK;
}
hsa_status_t hsa_system_get_major_extension_table(uint16_t, uint16_t, size_t size, void *table) {
    memset(table, 0, size);
    return OK;
}
hsa_status_t hsa_iterate_agents(hsa_status_t (*call)(hsa_agent_t, void *), void *data) {
    for (int n = 0; n <= devices(); ++n)
        if (hsa_status_t status = call(hsa_agent_t{(uint64_t)(CPU + n)}, data))
            return status;
    return OK;
}
hsa_status_t hsa_agent_iterate_isas(hsa_agent_t, hsa_status_t (*call)(hsa_isa_t, void *), void *data) {
    return call(hsa_isa_t{1}, data);
}
hsa_status_t hsa_isa_get_info_alt(hsa_isa_t, hsa_isa_info_t what, void *value) {
    std::string name = isa();
    if (what == HSA_ISA_INFO_NAME_LENGTH) {
        *(uint32_t *)value = name.size() + 1;
        return OK;
    }
    if (what == HSA_ISA_INFO_NAME) {
        strcpy((char *)value, name.c_str());
        return OK;
    }
    return BAD;
}
hsa_status_t hsa_agent_get_info(hsa_agent_t agent, hsa_agent_info_t what, void *value) {
    bool cpu = agent.handle == CPU;
    int n = (int)agent.handle - GPU0;
    uint32_t *word = (uint32_t *)value;
    bool wave32 = !strncmp(gfx(), "gfx1", 4);
    switch ((int)what) {
    case HSA_AGENT_INFO_NAME: strcpy((char *)value, cpu ? "CPU" : gfx()); return OK;
    case HSA_AGENT_INFO_DEVICE:
        *(hsa_device_type_t *)value = cpu ? HSA_DEVICE_TYPE_CPU : HSA_DEVICE_TYPE_GPU;
        return OK;
    case HSA_AGENT_INFO_PROFILE: *(hsa_profile_t *)value = HSA_PROFILE_BASE; return OK;
    case HSA_AGENT_INFO_VERSION_MAJOR:
    case HSA_AGENT_INFO_VERSION_MINOR: *(uint16_t *)value = 1; return OK;
    case HSA_AGENT_INFO_WAVEFRONT_SIZE: *word = wave32 ? 32 : 64; return OK;
    case HSA_AGENT_INFO_WORKGROUP_MAX_SIZE: *word = 1024; return OK;
    case HSA_AGENT_INFO_WORKGROUP_MAX_DIM:
        for (int i = 0; i < 3; ++i)
            ((uint16_t *)value)[i] = 1024;
        return OK;
    case HSA_AGENT_INFO_QUEUE_MAX_SIZE: *word = 131072; return OK;
    case HSA_AGENT_INFO_CACHE_SIZE:
        word[0] = 16384;
        word[1] = 4 << 20;
        word[2] = word[3] = 0;
        return OK;
    case HSA_AGENT_INFO_EXTENSIONS: memset(value, 0, 128); return OK; // no images
    case HSA_AGENT_INFO_NODE: *word = cpu ? 0 : n + 1; return OK;
    case HSA_AMD_AGENT_INFO_CHIP_ID: *word = 0x73bf; return OK;
    case HSA_AMD_AGENT_INFO_CACHELINE_SIZE: *word = 128; return OK;
    case HSA_AMD_AGENT_INFO_COMPUTE_UNIT_COUNT:
    case HSA_AMD_AGENT_INFO_COOPERATIVE_COMPUTE_UNIT_COUNT: *word = 40; return OK;
    case HSA_AMD_AGENT_INFO_MAX_CLOCK_FREQUENCY: *word = 2000; return OK;
    case HSA_AMD_AGENT_INFO_MEMORY_MAX_FREQUENCY: *word = 1000; return OK;
    case HSA_AMD_AGENT_INFO_DRIVER_NODE_ID: *word = cpu ? 0 : n + 1; return OK;
    case HSA_AMD_AGENT_INFO_BDFID: *word = (3 + n) << 8; return OK;
    case HSA_AMD_AGENT_INFO_DOMAIN: *word = 0; return OK;
    case HSA_AMD_AGENT_INFO_MEMORY_WIDTH: *word = 256; return OK;
    case HSA_AMD_AGENT_INFO_PRODUCT_NAME: strcpy((char *)value, "stand-in for an AMD GPU (no hardware)"); return OK;
    case HSA_AMD_AGENT_INFO_MAX_WAVES_PER_CU: *word = 32; return OK;
    case HSA_AMD_AGENT_INFO_NUM_SIMDS_PER_CU: *word = 2; return OK;
    case HSA_AMD_AGENT_INFO_NUM_SHADER_ENGINES: *word = 1; return OK;
    case HSA_AMD_AGENT_INFO_NUM_SHADER_ARRAYS_PER_SE: *word = 1; return OK;
    case HSA_AMD_AGENT_INFO_HDP_FLUSH: memset(value, 0, sizeof(hsa_amd_hdp_flush_t)); return OK;
    case HSA_AMD_AGENT_INFO_COOPERATIVE_QUEUES: *(bool *)value = false; return OK;
    case HSA_AMD_AGENT_INFO_UUID: snprintf((char *)value, 21, "GPU-%016x", 0xabc0 + n); return OK;
    case HSA_AMD_AGENT_INFO_ASIC_REVISION: *word = 0; return OK;
    case HSA_AMD_AGENT_INFO_SVM_DIRECT_HOST_ACCESS: *(bool *)value = false; return OK;
    case HSA_AMD_AGENT_INFO_MEMORY_AVAIL: *(uint64_t *)value = VRAM_SIZE - vram_used; return OK;
    case HSA_AMD_AGENT_INFO_TIMESTAMP_FREQUENCY: *(uint64_t *)value = 100000000; return OK;
    case HSA_AMD_AGENT_INFO_ASIC_FAMILY_ID: *word = 143; return OK;
    case HSA_AMD_AGENT_INFO_NUM_SDMA_ENG: *word = 2; return OK;
    case HSA_AMD_AGENT_INFO_NUM_SDMA_XGMI_ENG: *word = 0; return OK;
    case HSA_AMD_AGENT_INFO_NUM_XCC: *word = 1; return OK;
    case HSA_AMD_AGENT_INFO_MEMORY_PROPERTIES: memset(value, 0, 8); return OK;
    case 0xA116: // the largest scratch limit, and the present one: of 7.1
    case 0xA117: *(uint64_t *)value = 1 << 20; return OK;
    default: say("agent info 0x%x?", what); return BAD;
    }
}

hsa_status_t hsa_amd_agent_iterate_memory_pools(hsa_agent_t agent, hsa_status_t (*call)(hsa_amd_memory_pool_t, void *),
                                                void *data) {
    std::vector<uint64_t> pools = {FINE, KERNARG, COARSE};
    if (agent.handle != CPU) {
        uint64_t n = agent.handle - GPU0;
        pools = {VRAM + 16 * n, LDS + 16 * n};
    }
    for (uint64_t pool : pools)
        if (hsa_status_t status = call(hsa_amd_memory_pool_t{pool}, data))
            return status;
    return OK;
}
hsa_status_t hsa_amd_memory_pool_get_info(hsa_amd_memory_pool_t pool, hsa_amd_memory_pool_info_t what, void *value) {
    uint64_t p = pool.handle;
    bool lds = p >= VRAM && p % 16 == 1;
    switch ((int)what) {
    case HSA_AMD_MEMORY_POOL_INFO_SEGMENT:
        *(hsa_region_segment_t *)value = lds ? HSA_REGION_SEGMENT_GROUP : HSA_REGION_SEGMENT_GLOBAL;
        return OK;
    case HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS:
        *(uint32_t *)value = is_vram(p) || p == COARSE ? HSA_REGION_GLOBAL_FLAG_COARSE_GRAINED
                                                       : HSA_REGION_GLOBAL_FLAG_FINE_GRAINED |
                                                             (p == KERNARG ? HSA_REGION_GLOBAL_FLAG_KERNARG : 0);
        return OK;
    case HSA_AMD_MEMORY_POOL_INFO_SIZE: *(size_t *)value = lds ? 65536 : VRAM_SIZE; return OK;
    case HSA_AMD_MEMORY_POOL_INFO_ALLOC_MAX_SIZE: *(size_t *)value = VRAM_SIZE; return OK;
    case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED: *(bool *)value = !lds; return OK;
    case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_GRANULE: *(size_t *)value = GRANULE; return OK;
    case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_REC_GRANULE: *(size_t *)value = RECOMMENDED_GRANULE; return OK;
    case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALIGNMENT: *(size_t *)value = GRANULE; return OK;
    case HSA_AMD_MEMORY_POOL_INFO_ACCESSIBLE_BY_ALL: *(bool *)value = !is_vram(p); return OK;
    default: say("pool info 0x%x?", what); return BAD;
    }
}
hsa_status_t hsa_amd_agent_memory_pool_get_info(hsa_agent_t agent, hsa_amd_memory_pool_t pool,
                                                hsa_amd_agent_memory_pool_info_t what, void *value) {
    uint64_t owner = owner_of(pool.handle);
    switch (what) {
    case HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS: {
        hsa_amd_memory_pool_access_t access = HSA_AMD_MEMORY_POOL_ACCESS_ALLOWED_BY_DEFAULT;
        if (owner != agent.handle)
            access = HSA_AMD_MEMORY_POOL_ACCESS_DISALLOWED_BY_DEFAULT;
        if (agent.handle == CPU && owner != CPU && !option("LARGE_BAR"))
            access = HSA_AMD_MEMORY_POOL_ACCESS_NEVER_ALLOWED;
        if (agent.handle != CPU && owner != CPU && owner != agent.handle && option("NO_PEERS"))
            access = HSA_AMD_MEMORY_POOL_ACCESS_NEVER_ALLOWED;
        *(hsa_amd_memory_pool_access_t *)value = access;
        return OK;
    }
    case HSA_AMD_AGENT_MEMORY_POOL_INFO_NUM_LINK_HOPS: *(uint32_t *)value = owner == agent.handle ? 0 : 1; return OK;
    case HSA_AMD_AGENT_MEMORY_POOL_INFO_LINK_INFO: {
        hsa_amd_memory_pool_link_info_t *link = (hsa_amd_memory_pool_link_info_t *)value;
        memset(link, 0, sizeof *link);
        link->atomic_support_32bit = link->atomic_support_64bit = link->coherent_support = true;
        link->link_type = HSA_AMD_LINK_INFO_TYPE_PCIE;
        link->numa_distance = 20;
        return OK;
    }
    }
    return BAD;
}
}
