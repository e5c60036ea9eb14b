// SPDX-License-Identifier: Apache-2.0
// What the memory can do: copies and reads, on the kernels' threads.
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

struct memory_job {
	ofl_optim_read_fn *read;
	unsigned char *dst;
	const unsigned char *src;
	size_t num_bytes;
	size_t part_bytes;
	int is_nontemporal;
	uint64_t *sums;
};

static size_t part_length(const struct memory_job *job, size_t task)
{
	const size_t rest = job->num_bytes - task * job->part_bytes;

	return rest < job->part_bytes ? rest : job->part_bytes;
}

static void run_copy(const void *argument, size_t task)
{
	const struct memory_job *job = argument;
	const size_t first = task * job->part_bytes;
	const size_t length = part_length(job, task);

#if OFL_OPTIM_HAS_X86
	if (job->is_nontemporal && (ofl_optim_cpu_features() & OFL_OPTIM_FEATURE_AVX2)) {
		ofl_optim_copy_avx2(job->dst + first, job->src + first, length);
		return;
	}
#endif
	memcpy(job->dst + first, job->src + first, length);
}

/* Whole small pages for each thread; returns the number of parts. */
static size_t cut(struct memory_job *job, const struct ofl_optim_pool *pool)
{
	const size_t num_parts = (size_t)ofl_optim_pool_num_threads(pool);

	job->part_bytes = (job->num_bytes / num_parts / 4096 + 1) * 4096;
	return (job->num_bytes + job->part_bytes - 1) / job->part_bytes;
}

int ofl_optim_copy(struct ofl_optim_pool *pool, void *dst, const void *src,
		   size_t num_bytes, int is_nontemporal)
{
	struct memory_job job = {.dst = dst,
				 .src = src,
				 .num_bytes = num_bytes,
				 .is_nontemporal = is_nontemporal};
	size_t num_parts;

	if (!pool || !dst || !src || (is_nontemporal && (uintptr_t)dst % 32))
		return -EINVAL;
	if (num_bytes == 0)
		return 0;
	num_parts = cut(&job, pool);
	ofl_optim_pool_run(pool, run_copy, &job, num_parts);
	return 0;
}

static void run_read(const void *argument, size_t task)
{
	const struct memory_job *job = argument;
	const unsigned char *at = job->src + task * job->part_bytes;

	job->sums[task] = job->read((const uint64_t *)(const void *)at,
				    part_length(job, task) / sizeof(uint64_t));
}

int ofl_optim_read(struct ofl_optim_pool *pool, int variant, const void *data,
		   size_t num_bytes, uint64_t *sum)
{
	struct memory_job job = {.src = data, .num_bytes = num_bytes};
	const struct ofl_optim_variant *kernels;
	size_t num_parts;
	int error = ofl_optim_find_variant(variant, &kernels);

	if (error)
		return error;
	if (!pool || !data || !sum || (uintptr_t)data % sizeof(uint64_t))
		return -EINVAL;
	job.read = kernels->read;
	num_parts = cut(&job, pool);
	job.sums = calloc(num_parts + 1, sizeof(*job.sums));
	if (!job.sums)
		return -ENOMEM;
	ofl_optim_pool_run(pool, run_read, &job, num_parts);
	*sum = 0;
	for (size_t i = 0; i < num_parts; i++)
		*sum ^= job.sums[i];
	free(job.sums);
	return 0;
}
