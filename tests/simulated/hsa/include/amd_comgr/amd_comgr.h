/* Debian's or Ubuntu's header of comgr, and the later names that clr mentions. Nothing that the tests do calls them. */
#ifndef STAND_IN_COMGR_H
#define STAND_IN_COMGR_H
#if __has_include(</usr/include/amd_comgr/amd_comgr.h>) /* Ubuntu's, where the other one warns */
#include </usr/include/amd_comgr/amd_comgr.h>
#else
#include </usr/include/amd_comgr.h>
#endif
#define AMD_COMGR_DATA_KIND_BC_BUNDLE ((amd_comgr_data_kind_t)0x11)
#define AMD_COMGR_DATA_KIND_AR_BUNDLE ((amd_comgr_data_kind_t)0x12)
#define AMD_COMGR_DATA_KIND_OBJ_BUNDLE ((amd_comgr_data_kind_t)0x13)
#define AMD_COMGR_ACTION_COMPILE_SOURCE_TO_RELOCATABLE ((amd_comgr_action_kind_t)0x70)
#define AMD_COMGR_ACTION_UNBUNDLE ((amd_comgr_action_kind_t)0x71)
#define AMD_COMGR_DATA_KIND_SPIRV ((amd_comgr_data_kind_t)0x14)
#define AMD_COMGR_ACTION_COMPILE_SPIRV_TO_RELOCATABLE ((amd_comgr_action_kind_t)0x72)
#define AMD_COMGR_ACTION_TRANSLATE_SPIRV_TO_BC ((amd_comgr_action_kind_t)0x73)
#ifdef __cplusplus
extern "C" {
#endif
amd_comgr_status_t amd_comgr_populate_mangled_names(amd_comgr_data_t data, size_t *count);
amd_comgr_status_t amd_comgr_get_mangled_name(amd_comgr_data_t data, size_t index, size_t *size, char *name);
amd_comgr_status_t amd_comgr_populate_name_expression_map(amd_comgr_data_t data, size_t *count);
amd_comgr_status_t amd_comgr_map_name_expression_to_symbol_name(amd_comgr_data_t data, size_t *size,
                                                                char *expression, char *symbol);
amd_comgr_status_t amd_comgr_action_info_set_bundle_entry_ids(amd_comgr_action_info_t action, const char *ids[],
                                                              size_t count);
amd_comgr_status_t amd_comgr_action_info_set_device_lib_linking(amd_comgr_action_info_t action, bool links);
#ifdef __cplusplus
}
#endif
#endif
