// SPDX-License-Identifier: Apache-2.0
// The optimizer kernels of offload: the public C API; its comments are the contract.
#ifndef OFL_OPTIM_H
#define OFL_OPTIM_H

#include <stddef.h>
#include <stdint.h>

/*
 * General
 *
 * Every kernel exists in variants (scalar, AVX2, AVX-512, NEON).  All variants,
 * any number of threads and any slicing give the same bits; docs/numerics.md
 * states the arithmetic.  Functions return 0 or a count, or -errno:
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
#define OFL_OPTIM_NEON	       3
#define OFL_OPTIM_NUM_VARIANTS 4

/* CPU features, as bits: what OFFLOAD_DISABLE_CPU_FEATURES can name. */
#define OFL_OPTIM_FEATURE_AVX2	 1u
#define OFL_OPTIM_FEATURE_AVX512 2u
#define OFL_OPTIM_FEATURE_NEON	 4u

/*
 * The features that both the CPU and the operating system support (the latter
 * says in XCR0 which registers it saves).  OFL_OPTIM_FEATURE_AVX2 stands for AVX2
 * and F16C, OFL_OPTIM_FEATURE_AVX512 for AVX-512 F and BW, and F16C.  Thread-safe.
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

/* "scalar", "avx2", "avx512", "neon"; NULL for an unknown variant.  Thread-safe. */
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

/* Update rules. */
#define OFL_OPTIM_ADAMW	    0 /* first: exp_avg, second: exp_avg_sq */
#define OFL_OPTIM_ADAM	    1 /* the same; decay goes into the gradient */
#define OFL_OPTIM_LION	    2 /* first: exp_avg */
#define OFL_OPTIM_SGD	    3 /* no state */
#define OFL_OPTIM_MOMENTUM  4 /* SGD; first: momentum_buffer */
#define OFL_OPTIM_ADAGRAD   5 /* second: sum */
#define OFL_OPTIM_NUM_RULES 6

/* How the master weight is encoded. */
#define OFL_OPTIM_SPLIT	    0 /* bf16 parameter and the master's low 16 bits */
#define OFL_OPTIM_FP32	    1 /* fp32 master; the parameter is only written */
#define OFL_OPTIM_PARAMETER 2 /* the fp32 parameter is the master */

/* Dtypes. */
#define OFL_OPTIM_BF16 0
#define OFL_OPTIM_F32  1
#define OFL_OPTIM_F16  2

/*
 * What one pass works on: arrays of num_elements, none overlapping another, each
 * aligned to its element size.  64-byte alignment of the parameter is fastest.
 * All but the gradient are updated in place.
 */
struct ofl_optim_operands {
	int rule;
	int codec;
	int parameter_dtype; /* bf16 with SPLIT; bf16 or f16 with FP32; else f32 */
	int gradient_dtype;
	void *parameter;
	void *master; /* int16_t, float, or NULL, by codec */
	const void *gradient;
	float *first;  /* the rule's state, or NULL where it has none */
	float *second; /* likewise */
	uint64_t num_elements;
	float scales[2]; /* multiplied onto the gradient in this order; 1 = none */
};

/*
 * The scalars of one parameter's step, each rounded once from float64.  A rule
 * uses those that docs/numerics.md names for it and ignores the others.
 */
struct ofl_optim_scalars {
	float b1; /* beta1, or momentum */
	float c1; /* 1 - beta1, or 1 - dampening */
	float b2; /* beta2 */
	float c2; /* 1 - beta2 */
	float q;  /* 1 - lr * weight_decay */
	float w;  /* decay that goes into the gradient; 0 = none */
	float u;  /* the negative step size */
	float r;  /* 1 / (1 - beta2**t)**0.5 */
	float e;  /* eps */
	float a;  /* added to the sum at the first step */
	int is_nesterov;
};

/* Elements start .. stop - 1 are updated with these scalars. */
struct ofl_optim_range {
	uint64_t start;
	uint64_t stop;
	struct ofl_optim_scalars scalars;
};

/*
 * What a pass found in one range.  Sums of squares are formed as those of
 * ofl_optim_sums_of_squares(), with blocks counted from the start of the range.
 */
struct ofl_optim_statistics {
	double gradient;  /* of the gradient, after the scales */
	double update;	  /* of new master - old master, in fp32 */
	double parameter; /* of the new master */
	uint64_t
		num_nonfinite; /* infinities and NaN in the gradient, before the scales */
};

/*
 * One fused step over the ranges, which ascend and do not overlap.  Elements in
 * no range are neither read nor written.  With statistics, one of them per range,
 * these are taken while the data are in the cache.  Waits until it is done.
 */
int ofl_optim_update(struct ofl_optim_pool *pool, int variant,
		     const struct ofl_optim_operands *operands,
		     const struct ofl_optim_range *ranges, size_t num_ranges,
		     struct ofl_optim_statistics *statistics);

/* Elements of a norm block: see ofl_optim_sums_of_squares(). */
#define OFL_OPTIM_NORM_BLOCK 4096
#define OFL_OPTIM_NORM_LANES 16

/* One parameter's gradient. */
struct ofl_optim_gradient {
	const void *data;
	uint64_t num_elements;
	int dtype;
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

/* How many elements are infinite or NaN, into *count. */
int ofl_optim_count_nonfinite(struct ofl_optim_pool *pool, int variant,
			      const struct ofl_optim_gradient *gradient, uint64_t *count);

/*
 * Adds gradient to the accumulator, an array of as many elements: in fp32, then
 * rounded once to nearest even in the accumulator's dtype.  A NaN becomes the
 * quiet one.
 */
int ofl_optim_accumulate(struct ofl_optim_pool *pool, int variant, void *accumulator,
			 int accumulator_dtype,
			 const struct ofl_optim_gradient *gradient);

/*
 * Copy num_bytes between buffers that do not overlap, each thread a contiguous
 * part: with memcpy, or with non-temporal stores where the CPU has them (then
 * dst is aligned to 32 bytes).  For measuring what the memory can do.
 */
int ofl_optim_copy(struct ofl_optim_pool *pool, void *dst, const void *src,
		   size_t num_bytes, int is_nontemporal);

/*
 * Read num_bytes, each thread a contiguous part, and fold them into *sum: what
 * reading alone can do.  data is aligned to 8 bytes.
 */
int ofl_optim_read(struct ofl_optim_pool *pool, int variant, const void *data,
		   size_t num_bytes, uint64_t *sum);

/*
 * Read and write what an update of these operands would, in the same slices, and
 * compute nothing: what the memory can do with so many arrays.  Arrays are aligned to
 * 64 bytes; the elements after the last multiple of 64 are left out.  Values stay as
 * they are, except that under OFL_OPTIM_FP32 each parameter becomes 0x3f80: 1 in bf16.
 */
int ofl_optim_bare_pass(struct ofl_optim_pool *pool, int variant,
			const struct ofl_optim_operands *operands);

/* cffi: end */

#endif
