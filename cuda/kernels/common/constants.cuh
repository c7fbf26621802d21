// Mathematical constants.
#pragma once

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float lowest_float = -0x1.fffffep127f, least_normal = 0x1p-126f;
constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.69314718055994531f;
