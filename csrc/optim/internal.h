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

/* The one NaN that is ever written to master, exp_avg or exp_avg_sq. */
#define OFL_OPTIM_NAN 0x7fc00000u

/* Elements start .. stop - 1 of the operands, on the calling thread. */
typedef void ofl_optim_adamw_fn(const struct ofl_optim_adamw *operands,
				const struct ofl_optim_adamw_scalars *scalars,
				size_t start, size_t stop);

/* The sum of squares of one norm block of at most OFL_OPTIM_NORM_BLOCK elements. */
typedef double ofl_optim_norm_fn(const void *gradient, int dtype, size_t num_elements,
				 const float scales[2]);

ofl_optim_adamw_fn ofl_optim_adamw_scalar;
ofl_optim_norm_fn ofl_optim_norm_scalar;
#if OFL_OPTIM_HAS_X86
ofl_optim_adamw_fn ofl_optim_adamw_avx2;
ofl_optim_norm_fn ofl_optim_norm_avx2;
ofl_optim_adamw_fn ofl_optim_adamw_avx512;
ofl_optim_norm_fn ofl_optim_norm_avx512;
void ofl_optim_copy_avx2(unsigned char *dst, const unsigned char *src, size_t num_bytes);
#endif

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

/* Element i of a gradient in fp32, times the scales that are not 1. */
static inline float ofl_load_gradient(const void *gradient, int dtype, size_t i,
				      const float scales[2])
{
	float g = dtype == OFL_OPTIM_BF16
			  ? ofl_bf16_to_float(((const uint16_t *)gradient)[i])
			  : ((const float *)gradient)[i];

	if (scales[0] != 1.0f)
		g = g * scales[0];
	if (scales[1] != 1.0f)
		g = g * scales[1];
	return g;
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
