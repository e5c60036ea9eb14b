// SPDX-License-Identifier: Apache-2.0
// The optimizer kernels of offload: the public C API; its comments are the contract.
#ifndef OFL_OPTIM_H
#define OFL_OPTIM_H

#include <stddef.h>
#include <stdint.h>

/*
 * General
 *
 * Every kernel exists in variants (scalar, AVX2, AVX-512).  All variants, any
 * number of threads and any slicing give the same bits; docs/numerics.md states
 * the arithmetic.  Functions return 0 or a count, or -errno:
 *
 *   -EINVAL   an argument is wrong: a null or misaligned pointer, a range
 *             outside the operands, an unknown number.  Nothing was written.
 *   -ENOTSUP  the variant does not run on this CPU and operating system.
 *   -ENOMEM   no memory; nothing was written.
 *   -EAGAIN   no thread could be started.
 *
 * A caller's floating-point environment (rounding, flush-to-zero, denormals are
 * zero) neither matters nor is changed: kernels run in the default one.
 */

/* cffi: begin */

/* Variants, the least preferred first. */
#define OFL_OPTIM_SCALAR       0
#define OFL_OPTIM_AVX2	       1
#define OFL_OPTIM_AVX512       2
#define OFL_OPTIM_NUM_VARIANTS 3

/* CPU features, as bits: what OFFLOAD_DISABLE_CPU_FEATURES can name. */
#define OFL_OPTIM_FEATURE_AVX2	 1u
#define OFL_OPTIM_FEATURE_AVX512 2u

/*
 * The features that both the CPU and the operating system support (the latter
 * says in XCR0 which registers it saves).  OFL_OPTIM_FEATURE_AVX512 stands for
 * AVX-512 F and BW.  Thread-safe.
 */
unsigned ofl_optim_cpu_features(void);

/*
 * The features named in a comma-separated list such as "avx512,avx2"; spaces
 * and empty items are skipped.  Returns a mask, or -EINVAL if a name is
 * unknown.  Thread-safe.
 */
int ofl_optim_parse_features(const char *names);

/*
 * 1 if the variant runs with these features, else 0.  The AVX-512 variant needs
 * AVX2 as well, so without avx2 only the scalar variant is left.  Thread-safe.
 */
int ofl_optim_variant_runs(int variant, unsigned features);

/* "scalar", "avx2", "avx512"; NULL for an unknown variant.  Thread-safe. */
const char *ofl_optim_variant_name(int variant);

/*
 * The threads that kernels run on: the caller and num_threads - 1 of its own,
 * which sleep between calls.  A pool may be used by several threads; their calls
 * take turns.  In a process forked from the one that opened it, a pool runs
 * everything on the caller.
 */
struct ofl_optim_pool;

/* Returns 0 and sets *pool, or -EINVAL (num_threads < 1), -ENOMEM, -EAGAIN. */
int ofl_optim_pool_open(struct ofl_optim_pool **pool, int num_threads);

/* Ends the threads.  No call may be running.  NULL is allowed. */
void ofl_optim_pool_close(struct ofl_optim_pool *pool);

int ofl_optim_pool_num_threads(const struct ofl_optim_pool *pool);

/* How the master weight is encoded. */
#define OFL_OPTIM_SPLIT	    0 /* bf16 parameter and the master's low 16 bits */
#define OFL_OPTIM_FP32	    1 /* fp32 master; the bf16 parameter is only written */
#define OFL_OPTIM_PARAMETER 2 /* the fp32 parameter is the master */

#define OFL_OPTIM_BF16 0
#define OFL_OPTIM_F32  1

/*
 * What one AdamW pass works on: arrays of num_elements, none overlapping
 * another, each aligned to its element size.  64-byte alignment of the parameter
 * is fastest.  All but the gradient are updated in place.
 */
struct ofl_optim_adamw {
	int codec;
	int gradient_dtype; /* OFL_OPTIM_BF16 or OFL_OPTIM_F32 */
	void *parameter;    /* uint16_t (bf16), or float with OFL_OPTIM_PARAMETER */
	void *master;	    /* int16_t, float, or NULL, by codec */
	const void *gradient;
	float *exp_avg;
	float *exp_avg_sq;
	uint64_t num_elements;
	float scales[2]; /* multiplied onto the gradient in this order; 1 = none */
};

/* The scalars of one parameter's step, each rounded once from float64. */
struct ofl_optim_adamw_scalars {
	float c1; /* 1 - beta1 */
	float c2; /* 1 - beta2 */
	float b2; /* beta2 */
	float q;  /* 1 - lr * weight_decay */
	float u;  /* -(lr / (1 - beta1**t)) */
	float r;  /* 1 / (1 - beta2**t)**0.5 */
	float e;  /* eps */
};

/* Elements start .. stop - 1 are updated with these scalars. */
struct ofl_optim_adamw_range {
	uint64_t start;
	uint64_t stop;
	struct ofl_optim_adamw_scalars scalars;
};

/*
 * One fused AdamW step over the ranges, which ascend and do not overlap.
 * Elements in no range are neither read nor written.  Waits until it is done.
 */
int ofl_optim_adamw(struct ofl_optim_pool *pool, int variant,
		    const struct ofl_optim_adamw *operands,
		    const struct ofl_optim_adamw_range *ranges, size_t num_ranges);

/* Elements of a norm block: see ofl_optim_sums_of_squares(). */
#define OFL_OPTIM_NORM_BLOCK 4096
#define OFL_OPTIM_NORM_LANES 16

/* One parameter's gradient. */
struct ofl_optim_gradient {
	const void *data;
	uint64_t num_elements;
	int dtype; /* OFL_OPTIM_BF16 or OFL_OPTIM_F32 */
};

/*
 * The sum of squares of each gradient, into sums[i].  Within a block of 4096
 * elements 16 float64 lanes add the squares of elements j, j + 16, ... in order
 * from +0.0; lanes combine by halving; block sums are added in order.  The scales
 * are multiplied onto each element in fp32 first.  Waits until it is done.
 */
int ofl_optim_sums_of_squares(struct ofl_optim_pool *pool, int variant,
			      const struct ofl_optim_gradient *gradients,
			      size_t num_gradients, const float scales[2], double *sums);

/*
 * Copy num_bytes between buffers that do not overlap, each thread a contiguous
 * part: with memcpy, or with non-temporal stores where the CPU has them (then
 * dst is aligned to 32 bytes).  For measuring what the memory can do.
 */
int ofl_optim_copy(struct ofl_optim_pool *pool, void *dst, const void *src,
		   size_t num_bytes, int is_nontemporal);

/* cffi: end */

#endif
