/* What Debian's comgr (2.4) lacks, or does otherwise than the one that AMD's runtime was written for. */
#include "stand_in.h"

#include <amd_comgr/amd_comgr.h>
#include <cstring>
#include <dlfcn.h>

extern "C" {

amd_comgr_status_t amd_comgr_populate_mangled_names(amd_comgr_data_t, size_t *) { return AMD_COMGR_STATUS_ERROR; }
amd_comgr_status_t amd_comgr_get_mangled_name(amd_comgr_data_t, size_t, size_t *, char *) {
    return AMD_COMGR_STATUS_ERROR;
}
amd_comgr_status_t amd_comgr_populate_name_expression_map(amd_comgr_data_t, size_t *) { return AMD_COMGR_STATUS_ERROR; }
amd_comgr_status_t amd_comgr_map_name_expression_to_symbol_name(amd_comgr_data_t, size_t *, char *, char *) {
    return AMD_COMGR_STATUS_ERROR;
}
amd_comgr_status_t amd_comgr_action_info_set_bundle_entry_ids(amd_comgr_action_info_t, const char *[], size_t) {
    return AMD_COMGR_STATUS_ERROR;
}
amd_comgr_status_t amd_comgr_action_info_set_device_lib_linking(amd_comgr_action_info_t, bool) {
    return AMD_COMGR_STATUS_SUCCESS;
}
// Debian's device libraries 5.2.3 have no heap (which one of the blit kernels starts) and no batches of stream words:
// give a source that declares them empty ones. The stand-in knows the kernels by name and runs none of their code.
static const char *const LACKING[][2] = {
    {"extern void __ockl_dm_init_v1(ulong, ulong, uint, uint);",
     "void __ockl_dm_init_v1(ulong a, ulong b, uint c, uint d) {}\n"},
    {"extern void __amd_batchMemOp(__global void*, uint count);", "void __amd_batchMemOp(__global void* a, uint b) {}\n"},
};
amd_comgr_status_t amd_comgr_set_data(amd_comgr_data_t data, size_t size, const char *bytes) {
    static auto real = (amd_comgr_status_t (*)(amd_comgr_data_t, size_t, const char *))dlsym(
        dlopen("libamd_comgr.so.2", RTLD_NOW), "amd_comgr_set_data");
    std::string text(bytes, size), added;
    if (size < 1 << 20)
        for (auto &one : LACKING)
            if (text.find(one[0]) != std::string::npos)
                added += one[1];
    if (added.empty())
        return real(data, size, bytes);
    while (!text.empty() && !text.back())
        text.pop_back();
    text += "\n" + added;
    return real(data, text.size(), text.c_str());
}
// comgr 2.4 does not know the ABI version that clr's compiles carry: everything here is for the one GPU that there is.
amd_comgr_status_t amd_comgr_get_data_isa_name(amd_comgr_data_t, size_t *size, char *name) {
    std::string text = isa();
    if (name)
        memcpy(name, text.c_str(), text.size() + 1);
    *size = text.size() + 1;
    return AMD_COMGR_STATUS_SUCCESS;
}
}
