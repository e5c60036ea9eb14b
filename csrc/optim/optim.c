// SPDX-License-Identifier: Apache-2.0
// Updates: checks the operands, cuts the ranges into tasks and runs them on the pool.
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

static const struct ofl_optim_variant *const variants[OFL_OPTIM_NUM_VARIANTS] = {
	[OFL_OPTIM_SCALAR] = &ofl_optim_scalar,
#if OFL_OPTIM_HAS_X86
	[OFL_OPTIM_AVX2] = &ofl_optim_avx2,
	[OFL_OPTIM_AVX512] = &ofl_optim_avx512,
#endif
#if OFL_OPTIM_HAS_NEON
	[OFL_OPTIM_NEON] = &ofl_optim_neon,
#endif
};

int ofl_optim_find_variant(int variant, const struct ofl_optim_variant **found)
{
	if (variant < 0 || variant >= OFL_OPTIM_NUM_VARIANTS)
		return -EINVAL;
	if (!ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
		return -ENOTSUP;
	*found = variants[variant];
	return 0;
}

static int is_array(const void *array, size_t itemsize)
{
	return array && (uintptr_t)array % itemsize == 0;
}

static int is_dtype(int dtype)
{
	return dtype == OFL_OPTIM_BF16 || dtype == OFL_OPTIM_F16 ||
	       dtype == OFL_OPTIM_F32;
}

static int is_master(const struct ofl_optim_operands *o)
{
	switch (o->codec) {
	case OFL_OPTIM_SPLIT:
		return o->parameter_dtype == OFL_OPTIM_BF16 &&
		       is_array(o->master, sizeof(int16_t));
	case OFL_OPTIM_FP32:
		return (o->parameter_dtype == OFL_OPTIM_BF16 ||
			o->parameter_dtype == OFL_OPTIM_F16) &&
		       is_array(o->master, sizeof(float));
	case OFL_OPTIM_PARAMETER:
		return o->parameter_dtype == OFL_OPTIM_F32;
	default:
		return 0;
	}
}

static int is_state(const struct ofl_optim_operands *o)
{
	const int has_first = o->rule != OFL_OPTIM_SGD && o->rule != OFL_OPTIM_ADAGRAD;
	const int has_second = o->rule == OFL_OPTIM_ADAMW || o->rule == OFL_OPTIM_ADAM ||
			       o->rule == OFL_OPTIM_ADAGRAD;

	return has_first == is_array(o->first, sizeof(float)) &&
	       has_second == is_array(o->second, sizeof(float));
}

static int are_operands(const struct ofl_optim_operands *o)
{
	return o->rule >= 0 && o->rule < OFL_OPTIM_NUM_RULES &&
	       is_dtype(o->gradient_dtype) && is_dtype(o->parameter_dtype) &&
	       o->num_elements <= SIZE_MAX / sizeof(float) &&
	       is_array(o->parameter, ofl_itemsize(o->parameter_dtype)) &&
	       is_array(o->gradient, ofl_itemsize(o->gradient_dtype)) && is_master(o) &&
	       is_state(o);
}

static int are_ranges(const struct ofl_optim_range *ranges, size_t num_ranges,
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

struct update_job {
	ofl_optim_update_fn *run;
	const struct ofl_optim_operands *operands;
	const struct ofl_optim_range *ranges;
	size_t num_ranges;
	size_t start; /* the first range's, rounded down to whole slices */
};

/* The first range that ends after element i. */
static size_t find_range(const struct update_job *job, size_t i)
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

static void run_update(const void *argument, size_t task)
{
	const struct update_job *job = argument;
	const size_t start = job->start + task * SLICE_ELEMENTS;
	const size_t stop = start + SLICE_ELEMENTS;

	for (size_t i = find_range(job, start); i < job->num_ranges; i++) {
		const struct ofl_optim_range *range = &job->ranges[i];
		const size_t from = range->start > start ? range->start : start;
		const size_t to = range->stop < stop ? range->stop : stop;

		if (range->start >= stop)
			break;
		if (from < to)
			job->run(job->operands, &range->scalars, from, to);
	}
}

static void update_plainly(struct ofl_optim_pool *pool,
			   const struct ofl_optim_variant *kernels,
			   const struct ofl_optim_operands *operands,
			   const struct ofl_optim_range *ranges, size_t num_ranges)
{
	struct update_job job = {kernels->update, operands, ranges, num_ranges,
				 ranges[0].start / SLICE_ELEMENTS * SLICE_ELEMENTS};
	const size_t stop = ranges[num_ranges - 1].stop;

	ofl_optim_pool_run(pool, run_update, &job,
			   (stop - job.start + SLICE_ELEMENTS - 1) / SLICE_ELEMENTS);
}

/* Norm blocks of one task of a pass with statistics. */
#define BLOCKS_PER_TASK ((size_t)16)

struct measured_job {
	const struct ofl_optim_variant *kernels;
	const struct ofl_optim_operands *operands;
	const struct ofl_optim_range *range;
	struct ofl_optim_statistics *blocks;
	size_t num_blocks;
};

/* [Note: statistics from the cache] A block's operands are about 100 KB: they are read
 * from memory once and then found in the cache, before and after the update. */
static void measure_block(const struct measured_job *job, size_t start,
			  size_t num_elements, struct ofl_optim_statistics *found)
{
	const struct ofl_optim_variant *kernels = job->kernels;
	const struct ofl_optim_operands *o = job->operands;
	const char *gradient =
		(const char *)o->gradient + start * ofl_itemsize(o->gradient_dtype);
	const float ones[2] = {1.0f, 1.0f};
	float old[OFL_OPTIM_NORM_BLOCK], new[OFL_OPTIM_NORM_BLOCK];

	found->gradient =
		kernels->norm(gradient, o->gradient_dtype, num_elements, o->scales);
	found->num_nonfinite =
		kernels->nonfinite(gradient, o->gradient_dtype, num_elements);
	kernels->master(o, start, num_elements, old);
	kernels->update(o, &job->range->scalars, start, start + num_elements);
	kernels->master(o, start, num_elements, new);
	found->parameter = kernels->norm(new, OFL_OPTIM_F32, num_elements, ones);
	for (size_t i = 0; i < num_elements; i++)
		new[i] = new[i] - old[i];
	found->update = kernels->norm(new, OFL_OPTIM_F32, num_elements, ones);
}

static void run_measured(const void *argument, size_t task)
{
	const struct measured_job *job = argument;
	size_t stop = (task + 1) * BLOCKS_PER_TASK;

	if (stop > job->num_blocks)
		stop = job->num_blocks;
	for (size_t i = task * BLOCKS_PER_TASK; i < stop; i++) {
		const size_t first = job->range->start + i * OFL_OPTIM_NORM_BLOCK;
		const size_t rest = job->range->stop - first;

		measure_block(job, first,
			      rest < OFL_OPTIM_NORM_BLOCK ? rest : OFL_OPTIM_NORM_BLOCK,
			      &job->blocks[i]);
	}
}

static size_t blocks_of(const struct ofl_optim_range *range)
{
	const size_t num_elements = range->stop - range->start;

	return num_elements / OFL_OPTIM_NORM_BLOCK +
	       (num_elements % OFL_OPTIM_NORM_BLOCK != 0);
}

static int update_measured(struct ofl_optim_pool *pool,
			   const struct ofl_optim_variant *kernels,
			   const struct ofl_optim_operands *operands,
			   const struct ofl_optim_range *ranges, size_t num_ranges,
			   struct ofl_optim_statistics *statistics)
{
	struct measured_job job = {.kernels = kernels, .operands = operands};
	size_t most_blocks = 0;

	for (size_t i = 0; i < num_ranges; i++)
		if (blocks_of(&ranges[i]) > most_blocks)
			most_blocks = blocks_of(&ranges[i]);
	job.blocks = calloc(most_blocks + 1, sizeof(*job.blocks));
	if (!job.blocks)
		return -ENOMEM;
	for (size_t i = 0; i < num_ranges; i++) {
		struct ofl_optim_statistics sum = {0};

		job.range = &ranges[i];
		job.num_blocks = blocks_of(&ranges[i]);
		ofl_optim_pool_run(pool, run_measured, &job,
				   (job.num_blocks + BLOCKS_PER_TASK - 1) /
					   BLOCKS_PER_TASK);
		for (size_t j = 0; j < job.num_blocks; j++) {
			sum.gradient += job.blocks[j].gradient;
			sum.update += job.blocks[j].update;
			sum.parameter += job.blocks[j].parameter;
			sum.num_nonfinite += job.blocks[j].num_nonfinite;
		}
		statistics[i] = sum;
	}
	free(job.blocks);
	return 0;
}

int ofl_optim_update(struct ofl_optim_pool *pool, int variant,
		     const struct ofl_optim_operands *operands,
		     const struct ofl_optim_range *ranges, size_t num_ranges,
		     struct ofl_optim_statistics *statistics)
{
	const struct ofl_optim_variant *kernels;
	int error = ofl_optim_find_variant(variant, &kernels);

	if (error)
		return error;
	if (!pool || !operands || (num_ranges && !ranges) ||
	    !are_ranges(ranges, num_ranges, operands->num_elements))
		return -EINVAL;
	if (num_ranges == 0)
		return 0;
	if (operands->num_elements == 0) {
		if (statistics)
			memset(statistics, 0, num_ranges * sizeof(*statistics));
		return 0;
	}
	if (!are_operands(operands))
		return -EINVAL;
	if (statistics)
		return update_measured(pool, kernels, operands, ranges, num_ranges,
				       statistics);
	update_plainly(pool, kernels, operands, ranges, num_ranges);
	return 0;
}

/* Elements that every variant's bare pass takes at a time. */
#define BARE_STEP ((size_t)64)

struct bare_job {
	ofl_optim_bare_fn *run;
	struct ofl_optim_bare_array arrays[5];
	size_t num_arrays;
	size_t num_elements;
	int key;
};

static void run_bare(const void *argument, size_t task)
{
	const struct bare_job *job = argument;
	const size_t start = task * SLICE_ELEMENTS, stop = start + SLICE_ELEMENTS;

	job->run(job->arrays, job->num_arrays, start,
		 stop < job->num_elements ? stop : job->num_elements, job->key);
}

static int add_array(struct bare_job *job, const void *data, size_t itemsize, int is_read,
		     int is_written)
{
	if (!data)
		return 0;
	if ((uintptr_t)data % 64)
		return -EINVAL;
	job->arrays[job->num_arrays++] = (struct ofl_optim_bare_array){
		(char *)(uintptr_t)data, itemsize, is_read, is_written};
	return 0;
}

int ofl_optim_bare_pass(struct ofl_optim_pool *pool, int variant,
			const struct ofl_optim_operands *o)
{
	struct bare_job job = {.key = 0};
	const struct ofl_optim_variant *kernels;
	int error = ofl_optim_find_variant(variant, &kernels);

	if (error)
		return error;
	if (!pool || !o || (o->num_elements && !are_operands(o)))
		return -EINVAL;
	job.run = kernels->bare;
	job.num_elements = o->num_elements / BARE_STEP * BARE_STEP;
	if (add_array(&job, o->parameter, ofl_itemsize(o->parameter_dtype),
		      o->codec != OFL_OPTIM_FP32, 1) ||
	    add_array(&job, o->codec == OFL_OPTIM_PARAMETER ? NULL : o->master,
		      ofl_master_itemsize(o->codec), 1, 1) ||
	    add_array(&job, o->gradient, ofl_itemsize(o->gradient_dtype), 1, 0) ||
	    add_array(&job, o->first, sizeof(float), 1, 1) ||
	    add_array(&job, o->second, sizeof(float), 1, 1))
		return -EINVAL;
	ofl_optim_pool_run(pool, run_bare, &job,
			   (job.num_elements + SLICE_ELEMENTS - 1) / SLICE_ELEMENTS);
	return 0;
}
