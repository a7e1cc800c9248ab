/* What AMD's runtime is linked with and no test needs: images, shared virtual memory, files. A call fails, and is
 * logged. */
#include "stand_in.h"

#include <hsa/hsa_ext_image.h>

extern "C" {

#define NONE(name, ...)                                                                                                \
    hsa_status_t name(__VA_ARGS__) {                                                                                   \
        say(#name ": not here");                                                                                       \
        return HSA_STATUS_ERROR;                                                                                       \
    }
hsa_status_t hsa_amd_coherency_set_type(hsa_agent_t, hsa_amd_coherency_type_t) { return OK; }
hsa_status_t hsa_amd_agent_set_async_scratch_limit(hsa_agent_t, size_t) { return OK; }
hsa_status_t hsa_amd_register_system_event_handler(hsa_amd_system_event_callback_t, void *) { return OK; }
hsa_status_t hsa_amd_enable_logging(uint8_t *, void *) { return OK; }
NONE(hsa_amd_svm_attributes_set, void *, size_t, hsa_amd_svm_attribute_pair_t *, size_t)
NONE(hsa_amd_svm_attributes_get, void *, size_t, hsa_amd_svm_attribute_pair_t *, size_t)
NONE(hsa_amd_svm_prefetch_async, void *, size_t, hsa_agent_t, uint32_t, const hsa_signal_t *, hsa_signal_t)
NONE(hsa_amd_image_create, hsa_agent_t, const hsa_ext_image_descriptor_t *, const hsa_amd_image_descriptor_t *,
     const void *, hsa_access_permission_t, hsa_ext_image_t *)
NONE(hsa_ext_image_create, hsa_agent_t, const hsa_ext_image_descriptor_t *, const void *, hsa_access_permission_t,
     hsa_ext_image_t *)
NONE(hsa_ext_image_create_with_layout, hsa_agent_t, const hsa_ext_image_descriptor_t *, const void *,
     hsa_access_permission_t, hsa_ext_image_data_layout_t, size_t, size_t, hsa_ext_image_t *)
NONE(hsa_ext_image_data_get_info, hsa_agent_t, const hsa_ext_image_descriptor_t *, hsa_access_permission_t,
     hsa_ext_image_data_info_t *)
NONE(hsa_ext_image_destroy, hsa_agent_t, hsa_ext_image_t)
NONE(hsa_ext_image_export, hsa_agent_t, hsa_ext_image_t, void *, size_t, size_t, const hsa_ext_image_region_t *)
NONE(hsa_ext_image_import, hsa_agent_t, const void *, size_t, size_t, hsa_ext_image_t, const hsa_ext_image_region_t *)
NONE(hsa_ext_sampler_create, hsa_agent_t, const hsa_ext_sampler_descriptor_t *, hsa_ext_sampler_t *)
NONE(hsa_ext_sampler_destroy, hsa_agent_t, hsa_ext_sampler_t)
#if HSA_AMD_INTERFACE_VERSION_MINOR > 6 // those of 7.1
NONE(hsa_ext_sampler_create_v2, hsa_agent_t, const hsa_ext_sampler_descriptor_v2_t *, hsa_ext_sampler_t *)
NONE(hsa_amd_ais_file_read, hsa_amd_ais_file_handle_t, void *, uint64_t, int64_t, uint64_t *, int32_t *)
NONE(hsa_amd_ais_file_write, hsa_amd_ais_file_handle_t, void *, uint64_t, int64_t, uint64_t *, int32_t *)
#endif
}
