/* SPDX-License-Identifier: Apache-2.0 */
/* test_aio_control.c - cancelling, notifying, counters, registrations and faults. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "aio.h"
#include "check.h"

#define BLOCK_BYTES 4096
#define NUM_BLOCKS  64
#define FILE_BYTES  ((size_t)NUM_BLOCKS * BLOCK_BYTES)
#define DELAY_NS    20000000ULL

static unsigned char written[FILE_BYTES], found[FILE_BYTES];

static int open_temporary(void)
{
	char name[] = "test_aio_XXXXXX";
	int fd = mkostemp(name, O_CLOEXEC);

	CHECK(fd >= 0);
	CHECK_EQUAL(unlink(name), 0);
	return fd;
}

static struct ofl_aio *open_queue(const char *backend, uint32_t queue_depth,
				  const struct ofl_aio_faults *faults)
{
	const struct ofl_aio_options options = {
		.backend = backend,
		.queue_depth = queue_depth,
		.block_bytes = BLOCK_BYTES,
		.faults = faults,
	};
	struct ofl_aio *queue = NULL;

	if (ofl_aio_open(&options, &queue))
		return NULL;
	return queue;
}

static struct ofl_aio_request *submit(struct ofl_aio *queue, int operation, int fd,
				      void *buf, size_t len)
{
	const struct ofl_aio_transfer transfer = {
		.fd = fd,
		.operation = operation,
		.priority = OFL_AIO_PREFETCH,
		.alignment = 1,
		.buf = buf,
		.len = len,
	};
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

static struct ofl_aio_result move(struct ofl_aio *queue, int operation, int fd, void *buf,
				  size_t len)
{
	return finish(submit(queue, operation, fd, buf, len));
}

static struct ofl_aio_fault all_calls(void)
{
	return (struct ofl_aio_fault){
		.operations = OFL_AIO_FAULT_READS | OFL_AIO_FAULT_WRITES,
		.end = UINT64_MAX,
		.per_million = 1000000,
		.count = UINT64_MAX,
	};
}

static void test_cancel_ends_what_has_not_begun(void)
{
	struct ofl_aio_fault slow = all_calls();
	const struct ofl_aio_faults faults = {.rules = &slow, .num_rules = 1};
	struct ofl_aio_request *requests[8];
	struct ofl_aio_result result;
	struct ofl_aio_stats stats;
	struct ofl_aio *queue;
	int fd = open_temporary();

	slow.delay_ns = DELAY_NS;
	queue = open_queue("fault", 1, &faults);
	CHECK(queue);
	for (int i = 0; i < 8; i++)
		requests[i] = submit(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES);
	ofl_aio_cancel(queue);
	/* Those that had not begun are done at once. */
	for (int i = 1; i < 8; i++)
		CHECK_EQUAL(ofl_aio_is_done(requests[i]), 1);
	for (int i = 0; i < 8; i++) {
		result = finish(requests[i]);
		CHECK_EQUAL(result.error, -ECANCELED);
		CHECK(result.done_bytes <= BLOCK_BYTES);
	}
	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, 1).error, 0);
	ofl_aio_read_stats(queue, &stats);
	CHECK_EQUAL(stats.write_requests, 9);
	ofl_aio_cancel(queue); /* nothing to do */
	ofl_aio_close(queue);
	close(fd);
}

static bool is_readable(int event_fd)
{
	struct pollfd poll_fd = {.fd = event_fd, .events = POLLIN};

	return poll(&poll_fd, 1, 0) == 1;
}

static void test_notify_writes_when_the_request_is_done(void)
{
	struct ofl_aio_fault slow = all_calls();
	const struct ofl_aio_faults faults = {.rules = &slow, .num_rules = 1};
	int event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	int fd = open_temporary();
	struct pollfd poll_fd = {.fd = event_fd, .events = POLLIN};
	struct ofl_aio_request *request;
	struct ofl_aio *queue;
	uint64_t count;

	slow.delay_ns = DELAY_NS;
	queue = open_queue("fault", 1, &faults);
	CHECK(queue);
	request = submit(queue, OFL_AIO_WRITE, fd, written, 1);
	CHECK_EQUAL(ofl_aio_notify(request, event_fd), 0);
	CHECK_EQUAL(ofl_aio_notify(request, event_fd), -EBUSY);
	CHECK_EQUAL(poll(&poll_fd, 1, 60000), 1);
	CHECK_EQUAL(ofl_aio_is_done(request), 1);
	CHECK_EQUAL(read(event_fd, &count, sizeof(count)), sizeof(count));
	CHECK_EQUAL(count, 1);
	/* one that is done already; one that was taken back */
	CHECK_EQUAL(ofl_aio_notify(request, -1), 0);
	CHECK(!is_readable(event_fd));
	CHECK_EQUAL(ofl_aio_notify(request, event_fd), 0);
	CHECK(is_readable(event_fd));
	CHECK_EQUAL(read(event_fd, &count, sizeof(count)), sizeof(count));
	CHECK_EQUAL(finish(request).error, 0);
	request = submit(queue, OFL_AIO_WRITE, fd, written, 1);
	CHECK_EQUAL(ofl_aio_notify(request, event_fd), 0);
	CHECK_EQUAL(ofl_aio_notify(request, -1), 0);
	CHECK_EQUAL(finish(request).error, 0);
	ofl_aio_close(queue);
	close(event_fd);
	close(fd);
}

static uint64_t sum(const uint64_t *counts)
{
	uint64_t total = 0;

	for (int i = 0; i < OFL_AIO_NUM_LATENCIES; i++)
		total += counts[i];
	return total;
}

static void test_counters_hold_latencies(void)
{
	struct ofl_aio_fault slow = all_calls();
	const struct ofl_aio_faults faults = {.rules = &slow, .num_rules = 1};
	struct ofl_aio_stats stats;
	struct ofl_aio *queue;
	int fd = open_temporary();

	slow.delay_ns = DELAY_NS;
	queue = open_queue("fault", 2, &faults);
	CHECK(queue);
	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, 1).error, 0);
	CHECK_EQUAL(move(queue, OFL_AIO_READ, fd, found, 1).error, 0);
	CHECK_EQUAL(move(queue, OFL_AIO_READ, fd, found, 0).error, 0);
	ofl_aio_read_stats(queue, &stats);
	CHECK_EQUAL(sum(stats.write_latencies), 1);
	CHECK_EQUAL(sum(stats.read_latencies), 2);
	for (int i = 0; i < 14; i++) /* 2^14 us is less than the delay */
		CHECK_EQUAL(stats.write_latencies[i], 0);
	CHECK(stats.write_ns >= DELAY_NS);
	CHECK(stats.read_ns >= DELAY_NS);
	CHECK(stats.in_flight_ns >= 2 * DELAY_NS);
	CHECK(stats.in_flight_ns <= stats.read_ns + stats.write_ns);
	/* One after the other. */
	CHECK(stats.read_in_flight_ns >= DELAY_NS);
	CHECK(stats.write_in_flight_ns >= DELAY_NS);
	CHECK_EQUAL(stats.read_in_flight_ns + stats.write_in_flight_ns,
		    stats.in_flight_ns);
	CHECK_EQUAL(stats.both_bytes, 0);
	ofl_aio_close(queue);
	close(fd);
}

static void test_counters_tell_what_both_directions_moved_at_once(void)
{
	struct ofl_aio_fault slow = all_calls();
	const struct ofl_aio_faults faults = {.rules = &slow, .num_rules = 1};
	struct ofl_aio_request *writing, *reading;
	struct ofl_aio_stats stats;
	struct ofl_aio *queue;
	int fd = open_temporary();

	slow.operations = OFL_AIO_FAULT_READS;
	slow.delay_ns = DELAY_NS;
	queue = open_queue("fault", 2, &faults);
	CHECK(queue);
	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, 2).error, 0);
	reading = submit(queue, OFL_AIO_READ, fd, found, 2);
	writing = submit(queue, OFL_AIO_WRITE, fd, written, 1);
	CHECK_EQUAL(finish(writing).error, 0);
	CHECK_EQUAL(finish(reading).error, 0);
	ofl_aio_read_stats(queue, &stats);
	CHECK_EQUAL(stats.both_bytes, 1); /* the read ended alone */
	CHECK(stats.read_in_flight_ns + stats.write_in_flight_ns > stats.in_flight_ns);
	CHECK(stats.read_in_flight_ns >= DELAY_NS);
	CHECK(stats.write_in_flight_ns < stats.in_flight_ns);
	ofl_aio_close(queue);
	close(fd);
}

static void test_random_faults_are_continued_or_reported(void)
{
	struct ofl_aio_fault rules[3] = {all_calls(), all_calls(), all_calls()};
	struct ofl_aio_faults faults = {.rules = rules, .num_rules = 3};
	int fd = open_temporary();

	rules[0].per_million = 200000;
	rules[0].error = -EINTR;
	rules[1].per_million = 200000;
	rules[1].max_bytes = 1000;
	rules[2].per_million = 20000;
	rules[2].delay_ns = 1000000;
	for (faults.seed = 0; faults.seed < 8; faults.seed++) {
		struct ofl_aio *queue = open_queue("fault", 8, &faults);

		CHECK(queue);
		for (size_t i = 0; i < FILE_BYTES; i++)
			written[i] = (unsigned char)(i * 31 + faults.seed + i / 256);
		CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES).error, 0);
		memset(found, 0, FILE_BYTES);
		CHECK_EQUAL(move(queue, OFL_AIO_READ, fd, found, FILE_BYTES).error, 0);
		CHECK(!memcmp(found, written, FILE_BYTES));
		ofl_aio_close(queue);
	}
	close(fd);
}

static void test_a_rule_chooses_bytes_and_calls(void)
{
	struct ofl_aio_fault rule = all_calls();
	const struct ofl_aio_faults faults = {.rules = &rule, .num_rules = 1};
	struct ofl_aio_result result;
	struct ofl_aio *queue;
	int fd = open_temporary();

	rule.operations = OFL_AIO_FAULT_WRITES;
	rule.start = 5 * BLOCK_BYTES;
	rule.end = 6 * BLOCK_BYTES;
	rule.skip = 1;
	rule.count = 1;
	rule.error = -ENOSPC;
	queue = open_queue("fault", 1, &faults);
	CHECK(queue);
	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES).error, 0);
	result = move(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES);
	CHECK_EQUAL(result.error, -ENOSPC);
	CHECK_EQUAL(result.done_bytes, 5 * BLOCK_BYTES);
	CHECK_EQUAL(move(queue, OFL_AIO_READ, fd, found, FILE_BYTES).error, 0);
	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES).error, 0);
	ofl_aio_close(queue);
	close(fd);
}

static void test_wrong_faults_are_refused(void)
{
	struct ofl_aio_fault rule = all_calls();
	const struct ofl_aio_faults faults = {.rules = &rule, .num_rules = 1};

	rule.error = EIO; /* the sign */
	CHECK(!open_queue("fault", 1, &faults));
	rule.error = 0;
	rule.per_million = 1000001;
	CHECK(!open_queue("fault", 1, &faults));
}

static void test_registered_memory_moves_the_same_bytes(const char *backend)
{
	struct ofl_aio *queue = open_queue(backend, 4, NULL);
	int fd = open_temporary();
	int error;

	if (!queue) { /* not here */
		close(fd);
		return;
	}
	for (int turn = 0; turn < 300; turn++) { /* more than there are indices */
		error = ofl_aio_register(queue, found, FILE_BYTES);
		CHECK(!error || error == -EOPNOTSUPP || error == -ENOMEM);
		if (turn % 100 == 0) {
			memset(written, turn / 100 + 1, FILE_BYTES);
			CHECK_EQUAL(
				move(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES).error,
				0);
			CHECK_EQUAL(
				move(queue, OFL_AIO_READ, fd, found, FILE_BYTES).error,
				0);
			CHECK(!memcmp(found, written, FILE_BYTES));
		}
		ofl_aio_unregister(queue, found);
	}
	CHECK_EQUAL(ofl_aio_register(queue, NULL, 1), -EINVAL);
	CHECK_EQUAL(ofl_aio_register(queue, found, 0), -EINVAL);
	ofl_aio_unregister(queue, found);
	ofl_aio_close(queue);
	close(fd);
}

/* A number that is taken back and given to another file reaches that one. */
static void test_registered_files_are_those_of_their_numbers(const char *backend)
{
	struct ofl_aio *queue = open_queue(backend, 4, NULL);
	struct ofl_aio_stats stats;
	uint64_t num_pieces = 0;

	if (!queue) /* not here */
		return;
	for (int turn = 0; turn < 100; turn++) { /* more than there are indices */
		int fd = open_temporary();
		int error = ofl_aio_register_file(queue, fd);

		CHECK(!error || error == -EOPNOTSUPP);
		CHECK_EQUAL(ofl_aio_register_file(queue, fd), error);
		memset(written, turn + 1, FILE_BYTES);
		CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, written, FILE_BYTES).error, 0);
		CHECK_EQUAL(pread(fd, found, FILE_BYTES, 0), FILE_BYTES);
		CHECK(!memcmp(found, written, FILE_BYTES));
		ofl_aio_unregister_file(queue, fd);
		ofl_aio_unregister_file(queue, fd);
		close(fd);
		num_pieces += error ? 0 : FILE_BYTES / BLOCK_BYTES;
	}
	ofl_aio_read_stats(queue, &stats);
	CHECK_EQUAL(stats.registered_file_pieces, num_pieces);
	CHECK_EQUAL(ofl_aio_register_file(queue, -1), -EBADF);
	ofl_aio_close(queue);
}

static void test_more_files_than_can_be_registered_are_moved_too(void)
{
	struct ofl_aio *queue = open_queue("io_uring", 4, NULL);
	int fds[70], error = 0;

	if (!queue) /* not here */
		return;
	for (int i = 0; i < 70; i++) {
		fds[i] = open_temporary();
		error = ofl_aio_register_file(queue, fds[i]);
	}
	CHECK(error == -ENOSPC || error == -EOPNOTSUPP);
	for (int i = 0; i < 70; i++)
		CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fds[i], written, 1).error, 0);
	ofl_aio_unregister_file(queue, fds[0]);
	if (error == -ENOSPC) /* one index is free again */
		CHECK_EQUAL(ofl_aio_register_file(queue, fds[69]), 0);
	for (int i = 0; i < 70; i++) {
		CHECK_EQUAL(move(queue, OFL_AIO_READ, fds[i], found, 1).error, 0);
		CHECK_EQUAL(found[0], written[0]);
	}
	ofl_aio_close(queue);
	for (int i = 0; i < 70; i++)
		close(fds[i]);
}

int main(void)
{
	test_cancel_ends_what_has_not_begun();
	test_notify_writes_when_the_request_is_done();
	test_counters_hold_latencies();
	test_counters_tell_what_both_directions_moved_at_once();
	test_random_faults_are_continued_or_reported();
	test_a_rule_chooses_bytes_and_calls();
	test_wrong_faults_are_refused();
	test_registered_memory_moves_the_same_bytes("threads");
	test_registered_memory_moves_the_same_bytes("libaio");
	test_registered_memory_moves_the_same_bytes("io_uring");
	test_registered_files_are_those_of_their_numbers("libaio");
	test_registered_files_are_those_of_their_numbers("io_uring");
	test_more_files_than_can_be_registered_are_moved_too();
	return 0;
}
