/* A block of floats as e4m3 or int8 and its scale, and back.
 *
 * Numbers are those of `kvpool/device/quant.py`, to the bit: the same float32 operations in the
 * same order, each rounded (compile with -ffp-contract=off). Loops over elements have no branches
 * and compare integers, so that compilers vectorise them for the target of the function that they
 * are inlined into.
 */
#ifndef KVPOOL_BLOCKS_H
#define KVPOOL_BLOCKS_H

#include <stdint.h>
#include <string.h>

enum { AS_STORED, BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FLOAT8 }; /* of e4m3 without a scale */
enum { E4M3, INT8 };                                             /* codes */
enum { SCALE_FLOAT32, SCALE_FLOAT16, SCALE_E8M0 };

typedef uint16_t u16 __attribute__((may_alias, aligned(1)));
typedef uint32_t u32 __attribute__((may_alias, aligned(1)));
typedef float f32 __attribute__((may_alias, aligned(1)));
typedef double f64 __attribute__((may_alias, aligned(1)));

#define INLINE static inline __attribute__((always_inline))
#define SIGN 0x80000000u
#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Of normal numbers the exponent moves from bias 15 to 127; others are counted in steps of 2^-24. */
INLINE float from_float16(uint32_t half) {
    uint32_t doubled = half << 17; /* without the sign */
    float normal = float_of((doubled >> 4) + (0xE0u << 23)) * 0x1p-112f;
    float small = float_of((doubled >> 17) | (126u << 23)) - 0.5f;
    uint32_t size = doubled < (1u << 27) ? bits_of(small) : bits_of(normal);
    return float_of(size | (half & 0x8000u) << 16);
}

/* Added to 2^(e + 13), a number of exponent e is rounded to the 11 bits of float16. */
INLINE uint32_t to_float16(float number) {
    uint32_t bits = bits_of(number), size = bits & ~SIGN;
    uint32_t exponent = size & INFINITE;
    exponent = exponent < (113u << 23) ? 113u << 23 : exponent;
    uint32_t magic = exponent + (13u << 23);
    uint32_t steps = bits_of(float_of(size) + float_of(magic)) - magic;
    uint32_t half = ((exponent - (113u << 23)) >> 13) + steps;
    half = size > 0x477FEFFFu ? 0x7C00u : half; /* from 65520 on */
    half = size > INFINITE ? 0x7E00u : half;
    return half | (bits & SIGN) >> 16;
}

/* A finite number of at most 464, to nearest, ties to even, as above. */
INLINE uint32_t to_e4m3(float number) {
    uint32_t bits = bits_of(number), size = bits & ~SIGN;
    uint32_t exponent = size & INFINITE;
    exponent = exponent < (121u << 23) ? 121u << 23 : exponent;
    uint32_t magic = exponent + (20u << 23);
    uint32_t steps = bits_of(float_of(size) + float_of(magic)) - magic;
    return (((exponent - (121u << 23)) >> 20) + steps) | (bits & SIGN) >> 24;
}

INLINE float from_e4m3(uint32_t code) {
    uint32_t size = code & 0x7F;
    float number = float_of((size << 20) + (120u << 23));
    float small = float_of((size << 20) + (121u << 23)) - 0x1p-6f;
    uint32_t bits = size < 8 ? bits_of(small) : bits_of(number);
    bits = size == 0x7F ? NOT_A_NUMBER : bits;
    return float_of(bits | (code & 0x80) << 24);
}

/* To the nearest integer, ties to even, of at most 127. */
INLINE uint32_t to_int8(float number) { return bits_of(number + 0x1.8p23f) & 0xFF; }

/* Of no NaN but the one above, which it keeps. */
INLINE uint32_t to_bfloat16(uint32_t bits) { return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16; }

INLINE float number_at(const char *from, int64_t index, int floats) {
    switch (floats) {
    case BFLOAT16: return float_of((uint32_t)((const u16 *)from)[index] << 16);
    case FLOAT16: return from_float16(((const u16 *)from)[index]);
    case FLOAT32: return ((const f32 *)from)[index];
    case FLOAT8: return from_e4m3(((const uint8_t *)from)[index]);
    default: return (float)((const f64 *)from)[index];
    }
}

/* Bits of the largest magnitude: as integers they are ordered like the numbers, NaN above all. */
INLINE uint32_t largest_of(const char *from, int64_t count, int floats) {
    if (floats == BFLOAT16 || floats == FLOAT16) {
        int16_t most = 0;
        for (int64_t i = 0; i < count; i++) {
            int16_t size = (int16_t)(((const u16 *)from)[i] & 0x7FFF);
            most = size > most ? size : most;
        }
        uint16_t bits = (uint16_t)most;
        return bits_of(number_at((const char *)&bits, 0, floats));
    }
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t size = (int32_t)(bits_of(number_at(from, i, floats)) & ~SIGN);
        most = size > most ? size : most;
    }
    return (uint32_t)most;
}

/* What each element of a block is divided by, NaN if one is infinite or NaN; stores its scale. */
INLINE float factor_of(const char *given, int64_t count, int floats, int codes, int scale,
                       char *to) {
    uint32_t largest = largest_of(given, count, floats);
    float factor = float_of(largest) / (codes == E4M3 ? 448.0f : 127.0f);
    int finite = largest < INFINITE;
    if (!(factor >= 0x1p-126f)) factor = 0x1p-126f;
    if (!finite) factor = float_of(NOT_A_NUMBER);
    uint32_t bits = bits_of(factor);
    if (scale == SCALE_E8M0) { /* the next power of two */
        uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
        *(uint8_t *)to = finite ? (uint8_t)exponent : 255;
        return finite ? float_of(exponent << 23) : factor;
    }
    if (scale == SCALE_FLOAT16) {
        uint32_t half = to_float16(factor);
        *(u16 *)to = (uint16_t)((half & 0x7C00) == 0x7C00 ? 0x7E00 : half);
    } else {
        *(u32 *)to = bits;
    }
    return factor;
}

INLINE void quantise(const char *restrict given, uint8_t *restrict held, float factor,
                     int64_t count, int floats, int codes) {
    if (factor != factor) {
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = bits_of(number_at(given, i, floats));
            uint32_t sign = (bits & ~SIGN) > INFINITE ? (bits & SIGN) >> 24 : 0;
            held[i] = codes == E4M3 ? (uint8_t)(0x7F | sign) : 0;
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        float quotient = number_at(given, i, floats) / factor;
        held[i] = (uint8_t)(codes == E4M3 ? to_e4m3(quotient) : to_int8(quotient));
    }
}

INLINE float factor_at(const char *from, int scale) {
    if (scale == SCALE_FLOAT32) return *(const f32 *)from;
    if (scale == SCALE_FLOAT16) return from_float16(*(const u16 *)from);
    uint32_t exponent = *(const uint8_t *)from;
    if (exponent == 255) return float_of(NOT_A_NUMBER);
    return float_of(exponent ? exponent << 23 : 1u << 22); /* 2^-127 is no normal number */
}

/* No number of more than the bits of `most`, which is INFINITE where none can be. */
INLINE void products(char *restrict given, const uint8_t *restrict held, float factor,
                     int64_t count, int floats, int codes, uint32_t most) {
    for (int64_t i = 0; i < count; i++) {
        float code = codes == E4M3 ? from_e4m3(held[i]) : (float)(int8_t)held[i];
        uint32_t bits = bits_of(code * factor), size = bits & ~SIGN;
        uint32_t clamped = (size > most ? most : size) | (bits & SIGN);
        if (most < INFINITE) bits = size > INFINITE ? NOT_A_NUMBER : clamped;
        if (floats == BFLOAT16)
            ((u16 *)given)[i] = (uint16_t)to_bfloat16(bits);
        else if (floats == FLOAT16)
            ((u16 *)given)[i] = (uint16_t)to_float16(float_of(bits));
        else if (floats == FLOAT32)
            ((u32 *)given)[i] = bits;
        else
            ((f64 *)given)[i] = (double)float_of(bits);
    }
}

/* What would be beyond the largest number is that number. */
INLINE void dequantise(char *restrict given, const uint8_t *restrict held, float factor,
                       int64_t count, int floats, int codes) {
    const uint32_t most = floats == BFLOAT16  ? 0x7F7F0000u
                          : floats == FLOAT16 ? 0x477FE000u
                                              : 0x7F7FFFFFu;
    if ((bits_of(factor) & ~SIGN) < most - (9u << 23)) /* of 2^9 at most */
        products(given, held, factor, count, floats, codes, INFINITE);
    else
        products(given, held, factor, count, floats, codes, most);
}

#endif
