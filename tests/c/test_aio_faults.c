/* SPDX-License-Identifier: Apache-2.0 */
/* test_aio_faults.c - what the queue does with bad results, and in which order it works.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "queue.h"

#define BLOCK_BYTES 4096
#define FILE_BYTES  (8 * BLOCK_BYTES)
#define GATE_FD	    7

/* A file in memory, whose transfers go wrong as the test says. */
static char file[FILE_BYTES];
static ssize_t (*fault)(const struct ofl_aio_rest *rest); /* 0: no fault */
static atomic_uint num_calls;

static ssize_t fake_transfer(struct ofl_aio *queue, const struct ofl_aio_rest *rest)
{
	struct ofl_aio_rest now = *rest;
	ssize_t result = fault ? fault(rest) : 0;

	(void)queue;
	atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed);
	if (result < 0)
		return result;
	if (result > 0 && (size_t)result < now.len)
		now.len = (size_t)result;
	if (now.offset >= FILE_BYTES)
		return 0;
	if (now.len > FILE_BYTES - now.offset)
		now.len = FILE_BYTES - now.offset;
	if (now.operation == OFL_AIO_READ)
		memcpy(now.buf, file + now.offset, now.len);
	else
		memcpy(file + now.offset, now.buf, now.len);
	return (ssize_t)now.len;
}

static struct ofl_aio *open_queue(uint32_t queue_depth,
				  ssize_t (*transfer)(struct ofl_aio *queue,
						      const struct ofl_aio_rest *rest))
{
	static struct ofl_aio_backend_ops ops;
	const struct ofl_aio_options options = {.backend = "test",
						.queue_depth = queue_depth,
						.block_bytes = BLOCK_BYTES};
	struct ofl_aio *queue = NULL;

	ops = ofl_aio_backend_threads;
	ops.name = "test";
	ops.transfer = transfer;
	CHECK_EQUAL(ofl_aio_open_with(&ops, &options, &queue), 0);
	atomic_store(&num_calls, 0);
	return queue;
}

static struct ofl_aio_request *submit(struct ofl_aio *queue,
				      struct ofl_aio_transfer transfer)
{
	struct ofl_aio_request *request = NULL;

	CHECK_EQUAL(ofl_aio_submit(queue, &transfer, &request), 0);
	return request;
}

static struct ofl_aio_result finish(struct ofl_aio_request *request)
{
	struct ofl_aio_result result;

	CHECK_EQUAL(ofl_aio_wait(request, -1), 0);
	CHECK_EQUAL(ofl_aio_result(request, &result), 0);
	ofl_aio_release(request);
	return result;
}

static struct ofl_aio_result move_all(struct ofl_aio *queue, int operation, void *buf,
				      uint32_t alignment)
{
	return finish(submit(queue, (struct ofl_aio_transfer){
					    .operation = operation,
					    .alignment = alignment,
					    .buf = buf,
					    .len = FILE_BYTES,
				    }));
}

static ssize_t fault_short(const struct ofl_aio_rest *rest)
{
	return rest->len > 700 ? 700 : 0; /* no multiple of any alignment */
}

static ssize_t fault_interrupted(const struct ofl_aio_rest *rest)
{
	static atomic_uint count;

	(void)rest;
	switch (atomic_fetch_add(&count, 1) % 4) {
	case 0:
		return -EINTR;
	case 1:
		return -EAGAIN;
	default:
		return 333;
	}
}

static ssize_t fault_busy(const struct ofl_aio_rest *rest)
{
	(void)rest;
	return -EAGAIN;
}

static ssize_t fault_two_blocks(const struct ofl_aio_rest *rest)
{
	if (rest->offset / BLOCK_BYTES == 2)
		return -EIO;
	return rest->offset / BLOCK_BYTES == 5 ? -ENOSPC : 0;
}

static ssize_t none_accepted(struct ofl_aio *queue, const struct ofl_aio_rest *rest)
{
	(void)queue;
	(void)rest;
	return 0;
}

static ssize_t too_many_accepted(struct ofl_aio *queue, const struct ofl_aio_rest *rest)
{
	(void)queue;
	return (ssize_t)rest->len + 1;
}

static void check_round_trip(uint32_t alignment)
{
	static _Alignas(4096) char written[FILE_BYTES], found[FILE_BYTES];
	struct ofl_aio *queue = open_queue(3, fake_transfer);
	struct ofl_aio_result result;

	for (size_t i = 0; i < FILE_BYTES; i++)
		written[i] = (char)(i * 7 + i / 256);
	memset(file, 0, sizeof(file));
	memset(found, 0, sizeof(found));
	result = move_all(queue, OFL_AIO_WRITE, written, alignment);
	CHECK_EQUAL(result.error, 0);
	CHECK_EQUAL(result.done_bytes, FILE_BYTES);
	result = move_all(queue, OFL_AIO_READ, found, alignment);
	CHECK_EQUAL(result.error, 0);
	CHECK_EQUAL(result.done_bytes, FILE_BYTES);
	CHECK(!memcmp(written, found, FILE_BYTES));
	ofl_aio_close(queue);
}

static void test_short_transfers_are_continued(void)
{
	fault = fault_short;
	check_round_trip(1);
	check_round_trip(512); /* resumes at 512, not at 700 */
	fault = NULL;
}

static void test_interrupted_transfers_are_retried(void)
{
	fault = fault_interrupted;
	check_round_trip(1);
	fault = NULL;
}

static void test_a_transfer_that_stays_busy_fails_in_the_end(void)
{
	static char bytes[FILE_BYTES];
	struct ofl_aio *queue = open_queue(2, fake_transfer);

	fault = fault_busy;
	CHECK_EQUAL(move_all(queue, OFL_AIO_READ, bytes, 1).error, -EAGAIN);
	fault = NULL;
	ofl_aio_close(queue);
}

static void test_the_error_of_the_lowest_byte_is_reported(void)
{
	static char bytes[FILE_BYTES];
	struct ofl_aio_result result;
	struct ofl_aio_stats stats;

	fault = fault_two_blocks;
	for (uint32_t depth = 1; depth <= 8; depth++) {
		struct ofl_aio *queue = open_queue(depth, fake_transfer);

		result = move_all(queue, OFL_AIO_WRITE, bytes, 1);
		if (result.error == -EIO) {
			CHECK_EQUAL(result.done_bytes, 2 * BLOCK_BYTES);
		} else {
			/* block 5 failed first, and block 2 was not started any more */
			CHECK(depth > 1);
			CHECK_EQUAL(result.error, -ENOSPC);
		}
		if (depth == 1) /* after an error nothing more is started */
			CHECK_EQUAL(atomic_load(&num_calls), 3);
		ofl_aio_read_stats(queue, &stats);
		CHECK_EQUAL(stats.write_requests, 1);
		CHECK(stats.write_bytes >= 2 * BLOCK_BYTES);
		/* the queue goes on */
		fault = NULL;
		CHECK_EQUAL(move_all(queue, OFL_AIO_READ, bytes, 1).error, 0);
		fault = fault_two_blocks;
		ofl_aio_close(queue);
	}
	fault = NULL;
}

static void test_counts_that_cannot_be_are_errors(void)
{
	static char bytes[FILE_BYTES];
	struct ofl_aio *queue = open_queue(2, none_accepted);

	CHECK_EQUAL(move_all(queue, OFL_AIO_WRITE, bytes, 1).error, -EIO);
	CHECK_EQUAL(move_all(queue, OFL_AIO_READ, bytes, 1).error, -ENODATA);
	ofl_aio_close(queue);
	queue = open_queue(2, too_many_accepted);
	CHECK_EQUAL(move_all(queue, OFL_AIO_WRITE, bytes, 1).error, -EIO);
	ofl_aio_close(queue);
}

/* ---- order: transfers of GATE_FD wait until the test opens the gate ---- */

static sem_t gate, at_gate;
static uint64_t started[16];
static atomic_uint num_started;

static ssize_t gated_transfer(struct ofl_aio *queue, const struct ofl_aio_rest *rest)
{
	(void)queue;
	started[atomic_fetch_add(&num_started, 1)] = rest->offset;
	if (rest->fd == GATE_FD) {
		sem_post(&at_gate);
		while (sem_wait(&gate))
			;
	}
	return (ssize_t)rest->len;
}

static struct ofl_aio_transfer one_byte(int fd, int priority, uint64_t offset)
{
	static char byte;

	return (struct ofl_aio_transfer){
		.fd = fd,
		.operation = OFL_AIO_WRITE,
		.priority = priority,
		.alignment = 1,
		.buf = &byte,
		.len = 1,
		.offset = offset,
	};
}

static void test_waiting_for_one_does_not_wait_for_another(void)
{
	struct ofl_aio *queue = open_queue(2, gated_transfer);
	struct ofl_aio_result result;
	struct ofl_aio_request *slow, *quick;

	slow = submit(queue, one_byte(GATE_FD, OFL_AIO_NEEDED, 0));
	quick = submit(queue, one_byte(1, OFL_AIO_WRITE_BACK, 1));

	CHECK_EQUAL(finish(quick).error, 0);
	CHECK_EQUAL(ofl_aio_is_done(slow), 0);
	CHECK_EQUAL(ofl_aio_result(slow, &result), -EBUSY);
	CHECK_EQUAL(ofl_aio_wait(slow, 0), -ETIMEDOUT);
	CHECK_EQUAL(ofl_aio_wait(slow, 1000), -ETIMEDOUT);
	sem_post(&gate);
	CHECK_EQUAL(finish(slow).error, 0);
	CHECK_EQUAL(sem_wait(&at_gate), 0);
	ofl_aio_close(queue);
}

static void test_urgent_transfers_start_first(void)
{
	const uint64_t expected[] = {0, 1, 2, 3, 4, 5, 6};
	struct ofl_aio *queue = open_queue(1, gated_transfer);
	struct ofl_aio_request *requests[7];

	atomic_store(&num_started, 0);
	requests[0] = submit(queue, one_byte(GATE_FD, OFL_AIO_WRITE_BACK, 0));
	CHECK_EQUAL(sem_wait(&at_gate), 0); /* the only thread is busy now */
	requests[1] = submit(queue, one_byte(1, OFL_AIO_WRITE_BACK, 5));
	requests[2] = submit(queue, one_byte(1, OFL_AIO_PREFETCH, 3));
	requests[3] = submit(queue, one_byte(1, OFL_AIO_NEEDED, 1));
	requests[4] = submit(queue, one_byte(1, OFL_AIO_WRITE_BACK, 6));
	requests[5] = submit(queue, one_byte(1, OFL_AIO_PREFETCH, 4));
	requests[6] = submit(queue, one_byte(1, OFL_AIO_NEEDED, 2));
	sem_post(&gate);
	for (int i = 0; i < 7; i++)
		CHECK_EQUAL(finish(requests[i]).error, 0);

	CHECK_EQUAL(atomic_load(&num_started), 7);
	CHECK(!memcmp(started, expected, sizeof(expected)));
	ofl_aio_close(queue);
}

int main(void)
{
	sem_init(&gate, 0, 0);
	sem_init(&at_gate, 0, 0);
	test_short_transfers_are_continued();
	test_interrupted_transfers_are_retried();
	test_a_transfer_that_stays_busy_fails_in_the_end();
	test_the_error_of_the_lowest_byte_is_reported();
	test_counts_that_cannot_be_are_errors();
	test_waiting_for_one_does_not_wait_for_another();
	test_urgent_transfers_start_first();
	return 0;
}
