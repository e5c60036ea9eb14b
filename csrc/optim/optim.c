// SPDX-License-Identifier: Apache-2.0
// Checks arguments, picks the variant, cuts the work into slices and runs them on the
// pool.
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

struct variant {
	ofl_optim_adamw_fn *adamw;
	ofl_optim_norm_fn *norm;
};

static const struct variant variants[OFL_OPTIM_NUM_VARIANTS] = {
	[OFL_OPTIM_SCALAR] = {ofl_optim_adamw_scalar, ofl_optim_norm_scalar},
#if OFL_OPTIM_HAS_X86
	[OFL_OPTIM_AVX2] = {ofl_optim_adamw_avx2, ofl_optim_norm_avx2},
	[OFL_OPTIM_AVX512] = {ofl_optim_adamw_avx512, ofl_optim_norm_avx512},
#endif
};

/* Returns 0 and sets *found, or -EINVAL, -ENOTSUP. */
static int find_variant(int variant, const struct variant **found)
{
	if (variant < 0 || variant >= OFL_OPTIM_NUM_VARIANTS)
		return -EINVAL;
	if (!ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
		return -ENOTSUP;
	*found = &variants[variant];
	return 0;
}

static int is_array(const void *array, size_t itemsize)
{
	return array && (uintptr_t)array % itemsize == 0;
}

static size_t dtype_itemsize(int dtype)
{
	return dtype == OFL_OPTIM_BF16 ? sizeof(uint16_t) : sizeof(float);
}

static int are_operands(const struct ofl_optim_adamw *o)
{
	if (o->gradient_dtype != OFL_OPTIM_BF16 && o->gradient_dtype != OFL_OPTIM_F32)
		return 0;
	if (o->num_elements > SIZE_MAX / sizeof(float))
		return 0;
	if (!is_array(o->gradient, dtype_itemsize(o->gradient_dtype)) ||
	    !is_array(o->exp_avg, sizeof(float)) ||
	    !is_array(o->exp_avg_sq, sizeof(float)))
		return 0;
	switch (o->codec) {
	case OFL_OPTIM_SPLIT:
		return is_array(o->parameter, sizeof(uint16_t)) &&
		       is_array(o->master, sizeof(int16_t));
	case OFL_OPTIM_FP32:
		return is_array(o->parameter, sizeof(uint16_t)) &&
		       is_array(o->master, sizeof(float));
	case OFL_OPTIM_PARAMETER:
		return is_array(o->parameter, sizeof(float));
	default:
		return 0;
	}
}

static int are_ranges(const struct ofl_optim_adamw_range *ranges, size_t num_ranges,
		      uint64_t num_elements)
{
	uint64_t end = 0;

	for (size_t i = 0; i < num_ranges; i++) {
		if (ranges[i].start < end || ranges[i].stop < ranges[i].start ||
		    ranges[i].stop > num_elements)
			return 0;
		end = ranges[i].stop;
	}
	return 1;
}

/*
 * Elements of one task: large enough that taking it costs nothing, small enough
 * that threads end together.  A multiple of every vector step, so that slices of
 * an aligned parameter are aligned.
 */
#define SLICE_ELEMENTS ((size_t)1 << 16)

struct adamw_job {
	ofl_optim_adamw_fn *run;
	const struct ofl_optim_adamw *operands;
	const struct ofl_optim_adamw_range *ranges;
	size_t num_ranges;
	size_t start; /* the first range's, rounded down to whole slices */
};

/* The first range that ends after element i. */
static size_t find_range(const struct adamw_job *job, size_t i)
{
	size_t low = 0, high = job->num_ranges;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (job->ranges[middle].stop > i)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static void run_adamw(const void *argument, size_t task)
{
	const struct adamw_job *job = argument;
	const size_t start = job->start + task * SLICE_ELEMENTS;
	const size_t stop = start + SLICE_ELEMENTS;

	for (size_t i = find_range(job, start); i < job->num_ranges; i++) {
		const struct ofl_optim_adamw_range *range = &job->ranges[i];
		const size_t from = range->start > start ? range->start : start;
		const size_t to = range->stop < stop ? range->stop : stop;

		if (range->start >= stop)
			break;
		if (from < to)
			job->run(job->operands, &range->scalars, from, to);
	}
}

int ofl_optim_adamw(struct ofl_optim_pool *pool, int variant,
		    const struct ofl_optim_adamw *operands,
		    const struct ofl_optim_adamw_range *ranges, size_t num_ranges)
{
	const struct variant *kernels;
	struct adamw_job job;
	size_t stop;
	int error = find_variant(variant, &kernels);

	if (error)
		return error;
	if (!pool || !operands || (num_ranges && !ranges))
		return -EINVAL;
	if (operands->num_elements == 0 && are_ranges(ranges, num_ranges, 0))
		return 0;
	if (!are_operands(operands) ||
	    !are_ranges(ranges, num_ranges, operands->num_elements))
		return -EINVAL;
	if (num_ranges == 0)
		return 0;
	job = (struct adamw_job){kernels->adamw, operands, ranges, num_ranges,
				 ranges[0].start / SLICE_ELEMENTS * SLICE_ELEMENTS};
	stop = ranges[num_ranges - 1].stop;
	ofl_optim_pool_run(pool, run_adamw, &job,
			   (stop - job.start + SLICE_ELEMENTS - 1) / SLICE_ELEMENTS);
	return 0;
}

/* One task adds the squares of so many blocks. */
#define BLOCKS_PER_TASK ((size_t)16)

struct norm_job {
	ofl_optim_norm_fn *run;
	const struct ofl_optim_gradient *gradient;
	const float *scales;
	double *blocks;
	size_t num_blocks;
};

static void run_norm(const void *argument, size_t task)
{
	const struct norm_job *job = argument;
	const struct ofl_optim_gradient *gradient = job->gradient;
	const size_t itemsize = dtype_itemsize(gradient->dtype);
	size_t stop = (task + 1) * BLOCKS_PER_TASK;

	if (stop > job->num_blocks)
		stop = job->num_blocks;
	for (size_t i = task * BLOCKS_PER_TASK; i < stop; i++) {
		const size_t first = i * OFL_OPTIM_NORM_BLOCK;
		const size_t rest = gradient->num_elements - first;

		job->blocks[i] = job->run(
			(const char *)gradient->data + first * itemsize, gradient->dtype,
			rest < OFL_OPTIM_NORM_BLOCK ? rest : OFL_OPTIM_NORM_BLOCK,
			job->scales);
	}
}

static size_t count_blocks(const struct ofl_optim_gradient *gradient)
{
	return gradient->num_elements / OFL_OPTIM_NORM_BLOCK +
	       (gradient->num_elements % OFL_OPTIM_NORM_BLOCK != 0);
}

static int are_gradients(const struct ofl_optim_gradient *gradients, size_t num_gradients)
{
	for (size_t i = 0; i < num_gradients; i++) {
		const struct ofl_optim_gradient *gradient = &gradients[i];

		if (gradient->dtype != OFL_OPTIM_BF16 && gradient->dtype != OFL_OPTIM_F32)
			return 0;
		if (gradient->num_elements > SIZE_MAX / sizeof(float))
			return 0;
		if (gradient->num_elements &&
		    !is_array(gradient->data, dtype_itemsize(gradient->dtype)))
			return 0;
	}
	return 1;
}

int ofl_optim_sums_of_squares(struct ofl_optim_pool *pool, int variant,
			      const struct ofl_optim_gradient *gradients,
			      size_t num_gradients, const float scales[2], double *sums)
{
	const struct variant *kernels;
	struct norm_job job;
	size_t most_blocks = 0;
	int error = find_variant(variant, &kernels);

	if (error)
		return error;
	if (!pool || !scales || (num_gradients && (!gradients || !sums)) ||
	    !are_gradients(gradients, num_gradients))
		return -EINVAL;
	for (size_t i = 0; i < num_gradients; i++)
		if (count_blocks(&gradients[i]) > most_blocks)
			most_blocks = count_blocks(&gradients[i]);
	job = (struct norm_job){.run = kernels->norm, .scales = scales};
	job.blocks = malloc((most_blocks + 1) * sizeof(*job.blocks));
	if (!job.blocks)
		return -ENOMEM;
	for (size_t i = 0; i < num_gradients; i++) {
		job.gradient = &gradients[i];
		job.num_blocks = count_blocks(&gradients[i]);
		ofl_optim_pool_run(pool, run_norm, &job,
				   (job.num_blocks + BLOCKS_PER_TASK - 1) /
					   BLOCKS_PER_TASK);
		sums[i] = 0.0;
		for (size_t j = 0; j < job.num_blocks; j++)
			sums[i] += job.blocks[j];
	}
	free(job.blocks);
	return 0;
}

struct copy_job {
	unsigned char *dst;
	const unsigned char *src;
	size_t num_bytes;
	size_t part_bytes;
	int is_nontemporal;
};

static void run_copy(const void *argument, size_t task)
{
	const struct copy_job *job = argument;
	const size_t first = task * job->part_bytes;
	const size_t rest = job->num_bytes - first;
	const size_t length = rest < job->part_bytes ? rest : job->part_bytes;

#if OFL_OPTIM_HAS_X86
	if (job->is_nontemporal && (ofl_optim_cpu_features() & OFL_OPTIM_FEATURE_AVX2)) {
		ofl_optim_copy_avx2(job->dst + first, job->src + first, length);
		return;
	}
#endif
	memcpy(job->dst + first, job->src + first, length);
}

int ofl_optim_copy(struct ofl_optim_pool *pool, void *dst, const void *src,
		   size_t num_bytes, int is_nontemporal)
{
	struct copy_job job = {.dst = dst,
			       .src = src,
			       .num_bytes = num_bytes,
			       .is_nontemporal = is_nontemporal};
	size_t num_parts;

	if (!pool || !dst || !src || (is_nontemporal && (uintptr_t)dst % 32))
		return -EINVAL;
	if (num_bytes == 0)
		return 0;
	num_parts = (size_t)ofl_optim_pool_num_threads(pool);
	job.part_bytes = (num_bytes / num_parts / 4096 + 1) * 4096;
	ofl_optim_pool_run(pool, run_copy, &job,
			   (num_bytes + job.part_bytes - 1) / job.part_bytes);
	return 0;
}
