// SPDX-License-Identifier: Apache-2.0
// What the files of csrc/optim share: kernels of one slice, the table of variants, bf16.
#ifndef OFL_OPTIM_INTERNAL_H
#define OFL_OPTIM_INTERNAL_H

#include "optim.h"

#include <string.h>

#if defined(__FAST_MATH__)
#error "offload's kernels are defined bit for bit: do not compile them with -ffast-math"
#endif

/*
 * [Note: no fused multiply-add] A product and a sum round once each.  GCC fuses
 * across statements and intrinsics by default wherever the target has FMA, so
 * the build passes -ffp-contract=off, and these pragmas hold for a plain
 * `gcc -c` as well.
 */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define OFL_OPTIM_HAS_X86 1
#else
#define OFL_OPTIM_HAS_X86 0
#endif

#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define OFL_OPTIM_HAS_NEON 1
#else
#define OFL_OPTIM_HAS_NEON 0
#endif

/* The one NaN that is ever written to master, exp_avg or exp_avg_sq. */
#define OFL_OPTIM_NAN 0x7fc00000u

/* Updates elements start .. stop - 1 of the operands, on the calling thread. */
typedef void ofl_optim_update_fn(const struct ofl_optim_operands *operands,
				 const struct ofl_optim_scalars *scalars, size_t start,
				 size_t stop);

/* The fp32 masters of num_elements elements from start, into out. */
typedef void ofl_optim_master_fn(const struct ofl_optim_operands *operands, size_t start,
				 size_t num_elements, float *out);

/* The sum of squares of one norm block, at most OFL_OPTIM_NORM_BLOCK elements. */
typedef double ofl_optim_norm_fn(const void *values, int dtype, size_t num_elements,
				 const float scales[2]);

typedef uint64_t ofl_optim_nonfinite_fn(const void *values, int dtype,
					size_t num_elements);

typedef void ofl_optim_accumulate_fn(void *accumulator, int accumulator_dtype,
				     const void *gradient, int gradient_dtype,
				     size_t num_elements);

/* Folds whole 8-byte words. */
typedef uint64_t ofl_optim_read_fn(const uint64_t *words, size_t num_words);

/* One array of a bare pass. */
struct ofl_optim_bare_array {
	char *data;
	size_t itemsize;
	int is_read;
	int is_written;
};

/*
 * [Note: no zeros in a bare pass] Whole cache lines of zeros reach the memory faster than
 * others, at least here: an array that is only written gets ones of bf16.
 */
#define OFL_OPTIM_BARE_BITS 0x3f803f80

/* Adds key to each 32-bit word of elements start .. stop - 1, both multiples of 64, of
 * arrays that are read and written; to those that are only written goes the word above
 * plus key. */
typedef void ofl_optim_bare_fn(const struct ofl_optim_bare_array *arrays,
			       size_t num_arrays, size_t start, size_t stop, int key);

/* The kernels of one instruction set. */
struct ofl_optim_variant {
	ofl_optim_update_fn *update;
	ofl_optim_master_fn *master;
	ofl_optim_norm_fn *norm;
	ofl_optim_nonfinite_fn *nonfinite;
	ofl_optim_accumulate_fn *accumulate;
	ofl_optim_read_fn *read;
	ofl_optim_bare_fn *bare;
};

extern const struct ofl_optim_variant ofl_optim_scalar;
#if OFL_OPTIM_HAS_X86
extern const struct ofl_optim_variant ofl_optim_avx2;
extern const struct ofl_optim_variant ofl_optim_avx512;
void ofl_optim_copy_avx2(unsigned char *dst, const unsigned char *src, size_t num_bytes);
#endif
#if OFL_OPTIM_HAS_NEON
extern const struct ofl_optim_variant ofl_optim_neon;
#endif

/* Returns 0 and sets *found, or -EINVAL, -ENOTSUP. */
int ofl_optim_find_variant(int variant, const struct ofl_optim_variant **found);

/* One call per task index, on any of the pool's threads, in any order. */
typedef void ofl_optim_task_fn(const void *job, size_t task);

/* Runs tasks 0 .. num_tasks - 1 of a job and waits until all are done. */
void ofl_optim_pool_run(struct ofl_optim_pool *pool, ofl_optim_task_fn *run,
			const void *job, size_t num_tasks);

static inline float ofl_bits_to_float(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

static inline uint32_t ofl_float_to_bits(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

static inline float ofl_bf16_to_float(uint16_t value)
{
	return ofl_bits_to_float((uint32_t)value << 16);
}

static inline uint16_t ofl_float_to_bf16(float value)
{
	uint32_t bits = ofl_float_to_bits(value);

	if ((bits & 0x7fffffffu) > 0x7f800000u)
		return OFL_OPTIM_NAN >> 16;
	return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float ofl_f16_to_float(uint16_t value)
{
	const uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
	const uint32_t exponent = value >> 10 & 0x1fu, fraction = value & 0x3ffu;
	float magnitude;

	if (exponent == 0x1f) /* infinity, NaN: made quiet, as hardware does */
		return ofl_bits_to_float(sign | 0x7f800000u | fraction << 13 |
					 (fraction ? 0x00400000u : 0));
	if (exponent)
		return ofl_bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
	magnitude = (float)fraction * 0x1p-24f; /* exact */
	return ofl_bits_to_float(sign | ofl_float_to_bits(magnitude));
}

static inline uint16_t ofl_float_to_f16(float value)
{
	const uint32_t bits = ofl_float_to_bits(value);
	const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
	uint32_t half;

	if (magnitude > 0x7f800000u)
		half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
	else if (magnitude >= 0x477ff000u) /* 65520: rounds beyond 65504 */
		half = 0x7c00u;
	else if (magnitude >= 0x38800000u) /* 2**-14: normal, a carry is right */
		half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
	else /* adding 0.5 rounds at 2**-24, to nearest even */
		half = ofl_float_to_bits(ofl_bits_to_float(magnitude) + 0.5f) -
		       0x3f000000u;
	return (uint16_t)(sign | half);
}

static inline size_t ofl_itemsize(int dtype)
{
	return dtype == OFL_OPTIM_F32 ? sizeof(float) : sizeof(uint16_t);
}

static inline float ofl_load(const void *values, int dtype, size_t i)
{
	switch (dtype) {
	case OFL_OPTIM_BF16:
		return ofl_bf16_to_float(((const uint16_t *)values)[i]);
	case OFL_OPTIM_F16:
		return ofl_f16_to_float(((const uint16_t *)values)[i]);
	default:
		return ((const float *)values)[i];
	}
}

static inline void ofl_store(void *values, int dtype, size_t i, float value)
{
	switch (dtype) {
	case OFL_OPTIM_BF16:
		((uint16_t *)values)[i] = ofl_float_to_bf16(value);
		break;
	case OFL_OPTIM_F16:
		((uint16_t *)values)[i] = ofl_float_to_f16(value);
		break;
	default:
		((float *)values)[i] = value;
	}
}

/* Element i in fp32, times the scales that are not 1. */
static inline float ofl_load_scaled(const void *values, int dtype, size_t i,
				    const float scales[2])
{
	float g = ofl_load(values, dtype, i);

	if (scales[0] != 1.0f)
		g = g * scales[0];
	if (scales[1] != 1.0f)
		g = g * scales[1];
	return g;
}

static inline size_t ofl_master_itemsize(int codec)
{
	return codec == OFL_OPTIM_SPLIT ? sizeof(int16_t) : sizeof(float);
}

/* Adds the lanes of one norm block by halving: j += j + 8, + 4, + 2, + 1. */
static inline double ofl_combine_lanes(double lanes[OFL_OPTIM_NORM_LANES])
{
	for (int half = OFL_OPTIM_NORM_LANES / 2; half > 0; half /= 2)
		for (int j = 0; j < half; j++)
			lanes[j] += lanes[j + half];
	return lanes[0];
}

#endif
