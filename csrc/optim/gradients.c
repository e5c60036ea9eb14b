// SPDX-License-Identifier: Apache-2.0
// Gradients: their norm, values that are not finite, accumulation.
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

/* Norm blocks of one task: a page of small size at least, and threads end together. */
#define BLOCKS_PER_TASK ((size_t)64)
#define TASK_ELEMENTS	(BLOCKS_PER_TASK * OFL_OPTIM_NORM_BLOCK)

struct gradient_job {
	const struct ofl_optim_variant *kernels;
	const struct ofl_optim_gradient *gradient;
	const float *scales;
	double *blocks;
	size_t num_blocks;
	uint64_t *counts; /* one per task */
	char *accumulator;
	int accumulator_dtype;
};

static size_t count_blocks(const struct ofl_optim_gradient *gradient)
{
	return gradient->num_elements / OFL_OPTIM_NORM_BLOCK +
	       (gradient->num_elements % OFL_OPTIM_NORM_BLOCK != 0);
}

static size_t count_tasks(const struct ofl_optim_gradient *gradient)
{
	return (count_blocks(gradient) + BLOCKS_PER_TASK - 1) / BLOCKS_PER_TASK;
}

static const char *task_data(const struct gradient_job *job, size_t task)
{
	return (const char *)job->gradient->data +
	       task * TASK_ELEMENTS * ofl_itemsize(job->gradient->dtype);
}

static size_t task_elements(const struct gradient_job *job, size_t task)
{
	const size_t rest = job->gradient->num_elements - task * TASK_ELEMENTS;

	return rest < TASK_ELEMENTS ? rest : TASK_ELEMENTS;
}

static void run_norm(const void *argument, size_t task)
{
	const struct gradient_job *job = argument;
	const int dtype = job->gradient->dtype;
	const char *data = task_data(job, task);
	double *sum = job->blocks + task * BLOCKS_PER_TASK;
	size_t rest = task_elements(job, task);

	while (rest) {
		const size_t length =
			rest < OFL_OPTIM_NORM_BLOCK ? rest : OFL_OPTIM_NORM_BLOCK;

		*sum++ = job->kernels->norm(data, dtype, length, job->scales);
		data += length * ofl_itemsize(dtype);
		rest -= length;
	}
}

static int are_gradients(const struct ofl_optim_gradient *gradients, size_t num_gradients)
{
	for (size_t i = 0; i < num_gradients; i++) {
		const struct ofl_optim_gradient *gradient = &gradients[i];

		if (gradient->dtype != OFL_OPTIM_BF16 &&
		    gradient->dtype != OFL_OPTIM_F16 && gradient->dtype != OFL_OPTIM_F32)
			return 0;
		if (gradient->num_elements > SIZE_MAX / sizeof(float))
			return 0;
		if (gradient->num_elements &&
		    (!gradient->data ||
		     (uintptr_t)gradient->data % ofl_itemsize(gradient->dtype)))
			return 0;
	}
	return 1;
}

int ofl_optim_sums_of_squares(struct ofl_optim_pool *pool, int variant,
			      const struct ofl_optim_gradient *gradients,
			      size_t num_gradients, const float scales[2], double *sums)
{
	struct gradient_job job = {.scales = scales};
	size_t most_blocks = 0;
	int error = ofl_optim_find_variant(variant, &job.kernels);

	if (error)
		return error;
	if (!pool || !scales || (num_gradients && (!gradients || !sums)) ||
	    !are_gradients(gradients, num_gradients))
		return -EINVAL;
	for (size_t i = 0; i < num_gradients; i++)
		if (count_blocks(&gradients[i]) > most_blocks)
			most_blocks = count_blocks(&gradients[i]);
	job.blocks = malloc((most_blocks + 1) * sizeof(*job.blocks));
	if (!job.blocks)
		return -ENOMEM;
	for (size_t i = 0; i < num_gradients; i++) {
		job.gradient = &gradients[i];
		job.num_blocks = count_blocks(&gradients[i]);
		ofl_optim_pool_run(pool, run_norm, &job, count_tasks(&gradients[i]));
		sums[i] = 0.0;
		for (size_t j = 0; j < job.num_blocks; j++)
			sums[i] += job.blocks[j];
	}
	free(job.blocks);
	return 0;
}

static void run_nonfinite(const void *argument, size_t task)
{
	const struct gradient_job *job = argument;

	job->counts[task] = job->kernels->nonfinite(
		task_data(job, task), job->gradient->dtype, task_elements(job, task));
}

int ofl_optim_count_nonfinite(struct ofl_optim_pool *pool, int variant,
			      const struct ofl_optim_gradient *gradient, uint64_t *count)
{
	struct gradient_job job = {.gradient = gradient};
	int error = ofl_optim_find_variant(variant, &job.kernels);

	if (error)
		return error;
	if (!pool || !gradient || !count || !are_gradients(gradient, 1))
		return -EINVAL;
	job.counts = malloc((count_tasks(gradient) + 1) * sizeof(*job.counts));
	if (!job.counts)
		return -ENOMEM;
	ofl_optim_pool_run(pool, run_nonfinite, &job, count_tasks(gradient));
	*count = 0;
	for (size_t i = 0; i < count_tasks(gradient); i++)
		*count += job.counts[i];
	free(job.counts);
	return 0;
}

static void run_accumulate(const void *argument, size_t task)
{
	const struct gradient_job *job = argument;
	const size_t first = task * TASK_ELEMENTS;

	job->kernels->accumulate(job->accumulator +
					 first * ofl_itemsize(job->accumulator_dtype),
				 job->accumulator_dtype, task_data(job, task),
				 job->gradient->dtype, task_elements(job, task));
}

int ofl_optim_accumulate(struct ofl_optim_pool *pool, int variant, void *accumulator,
			 int accumulator_dtype, const struct ofl_optim_gradient *gradient)
{
	struct gradient_job job = {.gradient = gradient,
				   .accumulator = accumulator,
				   .accumulator_dtype = accumulator_dtype};
	struct ofl_optim_gradient as_gradient;
	int error = ofl_optim_find_variant(variant, &job.kernels);

	if (error)
		return error;
	if (!pool || !gradient || !are_gradients(gradient, 1))
		return -EINVAL;
	as_gradient = (struct ofl_optim_gradient){accumulator, gradient->num_elements,
						  accumulator_dtype};
	if (!are_gradients(&as_gradient, 1))
		return -EINVAL;
	ofl_optim_pool_run(pool, run_accumulate, &job, count_tasks(gradient));
	return 0;
}
