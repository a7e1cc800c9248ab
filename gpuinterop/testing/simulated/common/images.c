/*
 * Optimally tiled images in SwiftShader's layout. "Optimal" is linear there: width and height are rounded up to even
 * numbers of texels, the levels of a layer follow each other at multiples of 16 bytes, then comes the next layer.
 * Every level of an image that can be a cube has a border of one texel.
 */
#include "gis.h"

static uint64_t shrink(uint64_t edge, uint32_t level) {
    edge >>= level;
    return edge ? edge : 1;
}

static uint64_t even(uint64_t edge) { return (edge + 1) & ~(uint64_t)1; }

typedef struct {
    uint64_t pitch, slice, bytes;
} level_shape;

static level_shape shape_of(const gis_image *image, uint32_t level) {
    uint64_t border = image->cube ? 2 : 0;
    level_shape shape;
    shape.pitch = even(shrink(image->width, level) + border) * image->texel;
    shape.slice = shape.pitch * even(shrink(image->height, level) + border);
    shape.bytes = (shape.slice * (image->layers ? 1 : shrink(image->depth, level)) + 15) & ~(uint64_t)15;
    return shape;
}

static uint64_t layer_bytes(const gis_image *image, uint32_t levels) {
    uint64_t bytes = 0;
    for (uint32_t level = 0; level < levels; level++) bytes += shape_of(image, level).bytes;
    return bytes;
}

static uint64_t longest(const gis_image *image) {
    return image->width > image->height ? image->width : image->height;
}

static uint32_t all_levels(const gis_image *image) {
    uint32_t levels = 1;
    while (longest(image) >> levels) levels++;
    return levels;
}

bool gis_image_shape(gis_image *image, uint32_t flags, uint64_t depth) {
    bool layered = flags & GIS_LAYERED;
    image->cube = flags & GIS_CUBEMAP;
    *(layered || image->cube ? &image->layers : &image->depth) = depth;
    if (!image->texel || !image->width || !image->levels || image->levels > 64 || (layered && !depth)) return false;
    if (image->cube && (image->width != image->height || (layered ? depth % 6 != 0 : depth != 6))) return false;
    uint64_t edge = image->depth > longest(image) ? image->depth : longest(image);
    return image->levels == 1 || edge >> (image->levels - 1);
}

/*
 * For an image with more than one level, NVIDIA's Vulkan driver spaces the layers for all the levels that the image
 * could have, and its CUDA driver for the levels that the caller passes (measured: 580.159.04, an H200). So callers
 * must pass all levels to CUDA. SwiftShader spaces the layers only for the image's own levels. Here the memory's size
 * gives the right number, and a caller that passes fewer than all levels misses the layers after the first, as with
 * NVIDIA's driver.
 */
bool gis_image_fit(gis_image *image, uint64_t room) {
    image->present = image->levels;
    image->stride = layer_bytes(image, image->levels);
    if (image->layers > 1 && image->levels > 1 && !image->exact) {
        uint32_t all = all_levels(image);
        if (image->levels < all)
            image->stride -= layer_bytes(image, all) - image->stride;
        else
            while (image->present > 1 && layer_bytes(image, image->present) * image->layers > room) image->present--;
        if (image->present < image->levels) image->stride = layer_bytes(image, image->present);
    }
    return gis_image_size(image) <= room;
}

void gis_image_plane(const gis_image *image, uint32_t level, gis_plane *plane) {
    level_shape shape = shape_of(image, level);
    plane->offset = image->cube ? shape.pitch + image->texel : 0;
    for (uint32_t i = 0; i < level; i++) plane->offset += shape_of(image, i).bytes;
    plane->pitch = shape.pitch;
    plane->slice = image->layers ? image->stride : shape.slice;
    plane->width = shrink(image->width, level);
    plane->height = shrink(image->height, level);
    plane->depth = image->layers ? image->layers : shrink(image->depth, level);
}

uint64_t gis_image_size(const gis_image *image) {
    return layer_bytes(image, image->present) * (image->layers ? image->layers : 1);
}
