// SPDX-License-Identifier: Apache-2.0
// A range across element 2**31 gives what the same elements give in small arrays.
#define _GNU_SOURCE
#include "check.h"
#include "optim.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define BORDER	     ((size_t)1 << 31)
#define NUM_ELEMENTS (BORDER + 1000003)
#define START	     (BORDER - 70001) /* slices on both sides */
#define STOP	     (BORDER + 70003)
#define NUM_TOUCHED  (STOP - START)

/* Address space only: pages that nobody touches take no memory. */
static void *reserved(size_t num_bytes)
{
	void *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		exit(SKIPPED);
	return memory;
}

static struct ofl_optim_operands reserved_operands(size_t num_elements)
{
	return (struct ofl_optim_operands){
		.rule = OFL_OPTIM_ADAMW,
		.codec = OFL_OPTIM_SPLIT,
		.gradient_dtype = OFL_OPTIM_F32,
		.parameter = reserved(num_elements * sizeof(uint16_t)),
		.master = reserved(num_elements * sizeof(int16_t)),
		.gradient = reserved(num_elements * sizeof(float)),
		.first = reserved(num_elements * sizeof(float)),
		.second = reserved(num_elements * sizeof(float)),
		.num_elements = num_elements,
		.scales = {1.0f, 1.0f},
	};
}

static void fill(struct ofl_optim_operands *operands, size_t start)
{
	uint16_t *parameter = (uint16_t *)operands->parameter + start;
	float *gradient = (float *)(uintptr_t)operands->gradient + start;

	for (size_t i = 0; i < NUM_TOUCHED; i++) {
		parameter[i] = (uint16_t)(0x3c00 + i % 97);
		gradient[i] = 1e-3f * (float)(i % 64);
	}
}

static void step(struct ofl_optim_pool *pool, int variant,
		 struct ofl_optim_operands *operands, size_t start)
{
	const struct ofl_optim_range range = {
		start,
		start + NUM_TOUCHED,
		{.c1 = 0.1f,
		 .b2 = 0.95f,
		 .c2 = 0.05f,
		 .q = 0.99f,
		 .u = -1e-3f,
		 .r = 1.5f,
		 .e = 1e-8f},
	};

	fill(operands, start);
	CHECK_EQUAL(ofl_optim_update(pool, variant, operands, &range, 1, NULL), 0);
}

static void check_variant(struct ofl_optim_pool *pool, int variant)
{
	struct ofl_optim_operands large = reserved_operands(NUM_ELEMENTS);
	struct ofl_optim_operands small = reserved_operands(NUM_TOUCHED);

	step(pool, variant, &large, START);
	step(pool, variant, &small, 0);
	CHECK(!memcmp((uint16_t *)large.parameter + START, small.parameter,
		      NUM_TOUCHED * sizeof(uint16_t)));
	CHECK(!memcmp((int16_t *)large.master + START, small.master,
		      NUM_TOUCHED * sizeof(int16_t)));
	CHECK(!memcmp(large.first + START, small.first, NUM_TOUCHED * sizeof(float)));
	CHECK(!memcmp(large.second + START, small.second, NUM_TOUCHED * sizeof(float)));
	CHECK_EQUAL(large.first[START - 1], 0);
	CHECK_EQUAL(large.first[STOP], 0);
	CHECK(small.first[1] > 0.0f);
}

int main(void)
{
	struct ofl_optim_pool *pool;

	CHECK_EQUAL(ofl_optim_pool_open(&pool, 2), 0);
	for (int variant = 0; variant < OFL_OPTIM_NUM_VARIANTS; variant++)
		if (ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
			check_variant(pool, variant);
	ofl_optim_pool_close(pool);
	return 0;
}
