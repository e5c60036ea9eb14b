// SPDX-License-Identifier: Apache-2.0
// No kernel touches a byte outside its operands; vector variants equal the scalar one.
#define _GNU_SOURCE
#include "check.h"
#include "optim.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_ELEMENTS 129
#define NUM_OPERANDS 5

/* One page between two that may not be touched. */
struct guarded {
	unsigned char *page;
	size_t page_bytes;
};

/* The operands of one pass, each at the start or at the end of its page. */
struct placed {
	void *arrays[NUM_OPERANDS];
	size_t bytes[NUM_OPERANDS];
	struct ofl_optim_adamw adamw;
};

static struct guarded guarded_page(void)
{
	const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
	unsigned char *memory =
		mmap(NULL, 3 * page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	CHECK_EQUAL(mprotect(memory + page_bytes, page_bytes, PROT_READ | PROT_WRITE), 0);
	return (struct guarded){memory + page_bytes, page_bytes};
}

/* Values that differ from element to element and are ordinary in every format. */
static void fill(unsigned char *bytes, size_t num_bytes, unsigned seed)
{
	for (size_t i = 0; i < num_bytes; i++)
		bytes[i] = (unsigned char)(i % 2 ? 0x3c : (i * 37 + seed) % 251);
}

static struct placed place(struct guarded *pages, int codec, int dtype, size_t n,
			   int is_at_end)
{
	const size_t parameter = codec == OFL_OPTIM_PARAMETER ? 4 : 2;
	const size_t master = codec == OFL_OPTIM_SPLIT	? 2
			      : codec == OFL_OPTIM_FP32 ? 4
							: 0;
	const size_t gradient = dtype == OFL_OPTIM_BF16 ? 2 : 4;
	struct placed placed = {
		.bytes = {parameter * n, master * n, gradient * n, 4 * n, 4 * n}};

	for (int i = 0; i < NUM_OPERANDS; i++) {
		unsigned char *at = pages[i].page;

		if (is_at_end)
			at += pages[i].page_bytes - placed.bytes[i];
		fill(at, placed.bytes[i], (unsigned)i);
		placed.arrays[i] = at;
	}
	placed.adamw = (struct ofl_optim_adamw){
		.codec = codec,
		.gradient_dtype = dtype,
		.parameter = placed.arrays[0],
		.master = master ? placed.arrays[1] : NULL,
		.gradient = placed.arrays[2],
		.exp_avg = placed.arrays[3],
		.exp_avg_sq = placed.arrays[4],
		.num_elements = n,
		.scales = {0.5f, 3.0f},
	};
	return placed;
}

static void check_adamw(struct ofl_optim_pool *pool, struct guarded *pages,
			struct guarded *others, int variant, int codec, int dtype)
{
	for (size_t n = 0; n <= MAX_ELEMENTS; n++) {
		for (int is_at_end = 0; is_at_end < 2; is_at_end++) {
			struct placed a = place(pages, codec, dtype, n, is_at_end);
			struct placed b = place(others, codec, dtype, n, is_at_end);
			const struct ofl_optim_adamw_range range = {
				0, n, {0.1f, 0.05f, 0.95f, 0.99f, -1e-3f, 1.5f, 1e-8f}};

			CHECK_EQUAL(ofl_optim_adamw(pool, variant, &a.adamw, &range, 1),
				    0);
			CHECK_EQUAL(ofl_optim_adamw(pool, OFL_OPTIM_SCALAR, &b.adamw,
						    &range, 1),
				    0);
			for (int i = 0; i < NUM_OPERANDS; i++)
				CHECK(memcmp(a.arrays[i], b.arrays[i], a.bytes[i]) == 0);
		}
	}
}

static void check_norm(struct ofl_optim_pool *pool, struct guarded *page, int variant,
		       int dtype)
{
	const float scales[2] = {0.5f, 3.0f};
	const size_t itemsize = dtype == OFL_OPTIM_BF16 ? 2 : 4;

	for (size_t n = 0; n <= MAX_ELEMENTS; n++) {
		unsigned char *at = page->page + page->page_bytes - n * itemsize;
		const struct ofl_optim_gradient gradient = {at, n, dtype};
		double sum = -1.0, expected = -2.0;

		fill(at, n * itemsize, 1);
		CHECK_EQUAL(ofl_optim_sums_of_squares(pool, variant, &gradient, 1, scales,
						      &sum),
			    0);
		CHECK_EQUAL(ofl_optim_sums_of_squares(pool, OFL_OPTIM_SCALAR, &gradient,
						      1, scales, &expected),
			    0);
		CHECK(memcmp(&sum, &expected, sizeof(sum)) == 0);
	}
}

static void check_variant(struct ofl_optim_pool *pool, struct guarded *pages,
			  struct guarded *others, int variant)
{
	for (int dtype = OFL_OPTIM_BF16; dtype <= OFL_OPTIM_F32; dtype++) {
		for (int codec = OFL_OPTIM_SPLIT; codec <= OFL_OPTIM_PARAMETER; codec++)
			check_adamw(pool, pages, others, variant, codec, dtype);
		check_norm(pool, &pages[0], variant, dtype);
	}
}

/* Copies end at their last byte, whatever is left over after whole vectors. */
static void check_copy(struct ofl_optim_pool *pool, struct guarded *pages)
{
	for (size_t n = 0; n <= 200; n++) {
		unsigned char *from = pages[0].page + pages[0].page_bytes - n;

		fill(from, n, 5);
		memset(pages[1].page, 0, n + 1);
		for (int is_nontemporal = 0; is_nontemporal < 2; is_nontemporal++) {
			CHECK_EQUAL(ofl_optim_copy(pool, pages[1].page, from, n,
						   is_nontemporal),
				    0);
			CHECK(memcmp(pages[1].page, from, n) == 0);
			CHECK_EQUAL(pages[1].page[n], 0);
		}
	}
}

static void check_refusals(struct ofl_optim_pool *pool, struct guarded *pages)
{
	struct placed a = place(pages, OFL_OPTIM_SPLIT, OFL_OPTIM_BF16, 8, 0);
	struct ofl_optim_adamw_range range = {.start = 0, .stop = 9};
	struct ofl_optim_pool *none = NULL;

	CHECK_EQUAL(ofl_optim_adamw(pool, OFL_OPTIM_SCALAR, &a.adamw, &range, 1),
		    -EINVAL);
	range.stop = 8;
	CHECK_EQUAL(ofl_optim_adamw(NULL, OFL_OPTIM_SCALAR, &a.adamw, &range, 1),
		    -EINVAL);
	CHECK_EQUAL(ofl_optim_adamw(pool, 3, &a.adamw, &range, 1), -EINVAL);
	a.adamw.exp_avg = (float *)(void *)(pages[3].page + 2);
	CHECK_EQUAL(ofl_optim_adamw(pool, OFL_OPTIM_SCALAR, &a.adamw, &range, 1),
		    -EINVAL);
	a.adamw.exp_avg = NULL;
	CHECK_EQUAL(ofl_optim_adamw(pool, OFL_OPTIM_SCALAR, &a.adamw, &range, 1),
		    -EINVAL);
	CHECK_EQUAL(ofl_optim_pool_open(&none, 0), -EINVAL);
	CHECK_EQUAL(ofl_optim_parse_features("avx512, avx2,"), 3);
	CHECK_EQUAL(ofl_optim_parse_features(""), 0);
	CHECK_EQUAL(ofl_optim_parse_features("avx"), -EINVAL);
	CHECK_EQUAL(ofl_optim_parse_features("avx512f"), -EINVAL);
	ofl_optim_pool_close(NULL);
}

int main(void)
{
	struct guarded pages[NUM_OPERANDS], others[NUM_OPERANDS];
	struct ofl_optim_pool *pool;

	for (int i = 0; i < NUM_OPERANDS; i++) {
		pages[i] = guarded_page();
		others[i] = guarded_page();
	}
	CHECK_EQUAL(ofl_optim_pool_open(&pool, 2), 0);
	for (int variant = 0; variant < OFL_OPTIM_NUM_VARIANTS; variant++) {
		if (ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
			check_variant(pool, pages, others, variant);
		else
			printf("%s: does not run here\n",
			       ofl_optim_variant_name(variant));
	}
	check_copy(pool, pages);
	check_refusals(pool, pages);
	ofl_optim_pool_close(pool);
	return 0;
}
