#version 450

// Draws a slot of the shared field as picture.render does: each pixel reads its cells in place.

layout(std430, binding = 0) readonly buffer Field {
    float field[];
};

layout(std140, binding = 0) uniform Parameters {
    int width;
    int height;
    int slot;
    int factor;  // pixels along a cell's edge
    float scale;
};

layout(location = 0) out vec4 drawn;

const vec4 STOPS[] = vec4[](/* STOPS */);
const vec3 LIGHT = normalize(vec3(/* LIGHT */));

float cell(ivec2 at) {
    at = clamp(at, ivec2(0), ivec2(width, height) - 1);
    return field[(slot * height + at.y) * width + at.x];
}

float level(vec2 pixel) {
    vec2 at = (pixel + 0.5) / factor - 0.5;
    ivec2 first = ivec2(floor(at));
    vec2 part = at - first;
    float above = mix(cell(first), cell(first + ivec2(1, 0)), part.x);
    float below = mix(cell(first + ivec2(0, 1)), cell(first + 1), part.x);
    return clamp(mix(above, below, part.y) / scale, -1.35, 1.35);
}

void main() {
    vec2 size = vec2(width, height) * factor;
    vec2 pixel = gl_FragCoord.xy - 0.5;
    float here = level(pixel);
    float tone = sign(here) * pow(abs(here / 1.35), 0.82);
    vec3 colour = STOPS[0].rgb;
    for (int one = 1; one < STOPS.length(); ++one) {
        float past = STOPS[one - 1].w;
        colour = mix(colour, STOPS[one].rgb, clamp((tone - past) / (STOPS[one].w - past), 0.0, 1.0));
    }
    vec2 slope;
    for (int axis = 0; axis < 2; ++axis) {
        vec2 one = axis == 0 ? vec2(1, 0) : vec2(0, 1);
        vec2 from = max(pixel - one, 0.0), to = min(pixel + one, size - 1.0);
        slope[axis] = (level(to) - level(from)) / dot(to - from, one) * 5.0 * factor;
    }
    float facing = dot(vec3(-slope, 1.0), LIGHT) / sqrt(dot(slope, slope) + 1.0);
    float lit = clamp(facing, 0.0, 1.0);
    vec2 place = pixel / (size - 1.0) * 2.0 - 1.0;
    float vignette = 1.0 - 0.28 * pow(clamp(dot(place, place) / 2.0, 0.0, 1.0), 1.5);
    drawn = vec4((pow(colour, vec3(1.0 / 2.2)) * (0.62 + 0.72 * lit) + 0.22 * pow(lit, 18.0)) * vignette, 1.0);
}
