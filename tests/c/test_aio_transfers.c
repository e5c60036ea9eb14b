/* SPDX-License-Identifier: Apache-2.0 */
/* test_aio_transfers.c - the laws of aio.h on real files, for each backend. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "aio.h"
#include "check.h"

#define BLOCK_BYTES 4096
#define QUEUE_DEPTH 4

static const char *backend;

static struct ofl_aio *open_queue(void)
{
	const struct ofl_aio_options options = {.backend = backend,
						.queue_depth = QUEUE_DEPTH,
						.block_bytes = BLOCK_BYTES};
	struct ofl_aio *queue = NULL;

	CHECK_EQUAL(ofl_aio_open(&options, &queue), 0);
	return queue;
}

/* An unlinked file in the directory where the program runs. */
static int open_temporary(int flags)
{
	char name[] = "test_aio_XXXXXX";
	int fd = mkostemp(name, O_CLOEXEC | flags);

	if (fd >= 0)
		CHECK_EQUAL(unlink(name), 0);
	return fd;
}

static struct ofl_aio_request *submit(struct ofl_aio *queue, int operation, int fd,
				      void *buf, size_t len, uint64_t offset)
{
	const struct ofl_aio_transfer transfer = {
		.fd = fd,
		.operation = operation,
		.priority =
			operation == OFL_AIO_READ ? OFL_AIO_NEEDED : OFL_AIO_WRITE_BACK,
		.alignment = 1,
		.buf = buf,
		.len = len,
		.offset = offset,
	};
	struct ofl_aio_request *request = NULL;

	CHECK_EQUAL(ofl_aio_submit(queue, &transfer, &request), 0);
	return request;
}

static struct ofl_aio_result finish(struct ofl_aio_request *request)
{
	struct ofl_aio_result result;

	CHECK_EQUAL(ofl_aio_wait(request, -1), 0);
	CHECK_EQUAL(ofl_aio_is_done(request), 1);
	CHECK_EQUAL(ofl_aio_result(request, &result), 0);
	ofl_aio_release(request);
	return result;
}

static struct ofl_aio_result move(struct ofl_aio *queue, int operation, int fd, void *buf,
				  size_t len, uint64_t offset)
{
	return finish(submit(queue, operation, fd, buf, len, offset));
}

static void fill(unsigned char *bytes, size_t len, unsigned int seed)
{
	for (size_t i = 0; i < len; i++)
		bytes[i] = (unsigned char)((i * 2654435761u + seed) >> 7);
}

static void test_what_was_written_is_read_back(void)
{
	/* 0 and 1; around the block; several blocks and a tail; more than the depth */
	const size_t lengths[] = {0, 1, 4095, 4096, 4097, 12289, 65536, 1000003};
	const uint64_t offsets[] = {0, 1, 511, 4096, 5000000001};
	static unsigned char written[1000003], found[1000003];
	struct ofl_aio *queue = open_queue();
	int fd = open_temporary(0);
	struct ofl_aio_result result;

	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		for (size_t j = 0; j < sizeof(offsets) / sizeof(offsets[0]); j++) {
			size_t len = lengths[i];

			fill(written, len, (unsigned int)(i * 8 + j));
			memset(found, 0, len);
			result = move(queue, OFL_AIO_WRITE, fd, written, len, offsets[j]);
			CHECK_EQUAL(result.error, 0);
			CHECK_EQUAL(result.done_bytes, len);
			result = move(queue, OFL_AIO_READ, fd, found, len, offsets[j]);
			CHECK_EQUAL(result.error, 0);
			CHECK_EQUAL(result.done_bytes, len);
			CHECK(!memcmp(written, found, len));
		}
	}
	ofl_aio_close(queue);
	close(fd);
}

static void test_a_direct_file_round_trips(void)
{
	const size_t len = 64 * 4096;
	unsigned char *buf;
	struct ofl_aio *queue = open_queue();
	int fd = open_temporary(O_DIRECT);
	struct ofl_aio_transfer transfer = {fd, OFL_AIO_WRITE, 0, 4096, NULL, len, 4096};
	struct ofl_aio_request *request;
	struct ofl_aio_result result;

	if (fd >= 0) {
		buf = aligned_alloc(4096, 2 * len);
		CHECK(buf != NULL);
		fill(buf, len, 1);
		transfer.buf = buf;
		CHECK_EQUAL(ofl_aio_submit(queue, &transfer, &request), 0);
		CHECK_EQUAL(finish(request).error, 0);
		transfer.operation = OFL_AIO_READ;
		transfer.buf = buf + len;
		CHECK_EQUAL(ofl_aio_submit(queue, &transfer, &request), 0);
		CHECK_EQUAL(finish(request).error, 0);
		CHECK(!memcmp(buf, buf + len, len));
		/* the end of a direct file between two multiples of the alignment */
		CHECK_EQUAL(ftruncate(fd, 4096 + 8192 + 700), 0);
		CHECK_EQUAL(ofl_aio_submit(queue, &transfer, &request), 0);
		result = finish(request);
		CHECK_EQUAL(result.error, -ENODATA);
		CHECK_EQUAL(result.done_bytes, 8192 + 700);
		free(buf);
		close(fd);
	}
	ofl_aio_close(queue);
}

static void test_a_read_beyond_the_end_tells_what_it_found(void)
{
	static char bytes[40000];
	struct ofl_aio *queue = open_queue();
	int fd = open_temporary(0);
	struct ofl_aio_result result;

	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, fd, bytes, 10000, 0).error, 0);
	result = move(queue, OFL_AIO_READ, fd, bytes, sizeof(bytes), 100);
	CHECK_EQUAL(result.error, -ENODATA);
	CHECK_EQUAL(result.done_bytes, 9900);
	result = move(queue, OFL_AIO_READ, fd, bytes, 1, 10000);
	CHECK_EQUAL(result.error, -ENODATA);
	CHECK_EQUAL(result.done_bytes, 0);
	ofl_aio_close(queue);
	close(fd);
}

static void test_errors_of_the_system_arrive(void)
{
	static char bytes[20000];
	struct ofl_aio *queue = open_queue();
	int full = open("/dev/full", O_RDWR | O_CLOEXEC);
	int fd = open_temporary(0);
	struct ofl_aio_result result;

	close(fd);
	CHECK_EQUAL(move(queue, OFL_AIO_READ, fd, bytes, 1, 0).error, -EBADF);
	CHECK_EQUAL(move(queue, OFL_AIO_WRITE, -1, bytes, sizeof(bytes), 0).error,
		    -EBADF);
	/* libaio refuses files that have no write_iter(), as this device */
	if (full >= 0 && !strcmp(backend, "threads")) {
		result = move(queue, OFL_AIO_WRITE, full, bytes, sizeof(bytes), 0);
		CHECK_EQUAL(result.error, -ENOSPC);
		CHECK_EQUAL(result.done_bytes, 0);
	}
	if (full >= 0)
		close(full);
	ofl_aio_close(queue);
}

static void test_a_full_file_tells_how_far_it_got(void)
{
	static char bytes[5 * BLOCK_BYTES];
	struct rlimit before, limit;
	struct ofl_aio *queue = open_queue();
	int fd = open_temporary(0);
	struct ofl_aio_result result;

	CHECK_EQUAL(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit = before;
	limit.rlim_cur = 2 * BLOCK_BYTES + 100; /* inside the third piece */
	CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
	/* Also: the signal that comes with EFBIG does not end the program. */
	result = move(queue, OFL_AIO_WRITE, fd, bytes, sizeof(bytes), 0);
	CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &before), 0);

	CHECK_EQUAL(result.error, -EFBIG);
	CHECK_EQUAL(result.done_bytes, 2 * BLOCK_BYTES + 100);
	ofl_aio_close(queue);
	close(fd);
}

static void test_wrong_arguments_are_refused(void)
{
	static _Alignas(512) char bytes[1024];
	struct ofl_aio_options options = {
		.backend = "unknown", .queue_depth = 1, .block_bytes = 1};
	struct ofl_aio_transfer good = {0, OFL_AIO_READ, 0, 512, bytes, 512, 512};
	struct ofl_aio_transfer bad;
	struct ofl_aio_request *request = NULL;
	struct ofl_aio *queue = NULL;

	CHECK_EQUAL(ofl_aio_open(&options, &queue), -EINVAL);
	options = (struct ofl_aio_options){
		.backend = backend, .queue_depth = 0, .block_bytes = 4096};
	CHECK_EQUAL(ofl_aio_open(&options, &queue), -EINVAL);
	options = (struct ofl_aio_options){.backend = backend,
					   .queue_depth = OFL_AIO_MAX_QUEUE_DEPTH + 1,
					   .block_bytes = 4096};
	CHECK_EQUAL(ofl_aio_open(&options, &queue), -EINVAL);
	options = (struct ofl_aio_options){
		.backend = backend, .queue_depth = 1, .block_bytes = 0};
	CHECK_EQUAL(ofl_aio_open(&options, &queue), -EINVAL);
	CHECK(queue == NULL);

	queue = open_queue();
#define CHECK_REFUSED(field, value, error)                                   \
	do {                                                                 \
		bad = good;                                                  \
		bad.field = (value);                                         \
		CHECK_EQUAL(ofl_aio_submit(queue, &bad, &request), (error)); \
	} while (0)
	CHECK_REFUSED(operation, 2, -EINVAL);
	CHECK_REFUSED(priority, -1, -EINVAL);
	CHECK_REFUSED(priority, 3, -EINVAL);
	CHECK_REFUSED(alignment, 0, -EINVAL);
	CHECK_REFUSED(alignment, 3, -EINVAL);
	CHECK_REFUSED(alignment, 8192, -EINVAL); /* more than a block */
	CHECK_REFUSED(buf, bytes + 1, -EINVAL);
	CHECK_REFUSED(len, 511, -EINVAL);
	CHECK_REFUSED(offset, 513, -EINVAL);
	CHECK_REFUSED(offset, (uint64_t)INT64_MAX - 511, -EOVERFLOW);
	CHECK_REFUSED(offset, (uint64_t)1 << 63, -EOVERFLOW);
#undef CHECK_REFUSED
	CHECK(request == NULL);
	ofl_aio_close(queue);
}

static void test_close_carries_out_what_was_submitted(void)
{
	static unsigned char bytes[50][20000], found[20000];
	struct ofl_aio_request *requests[50];
	struct ofl_aio_result result;
	struct ofl_aio *queue = open_queue();
	int fd = open_temporary(0);

	for (unsigned int i = 0; i < 50; i++) {
		fill(bytes[i], sizeof(bytes[i]), i);
		requests[i] = submit(queue, OFL_AIO_WRITE, fd, bytes[i], sizeof(bytes[i]),
				     (uint64_t)i * sizeof(bytes[i]));
		if (i % 2) /* given up in flight: it is carried out all the same */
			ofl_aio_release(requests[i]);
	}
	ofl_aio_close(queue);

	for (unsigned int i = 0; i < 50; i++) {
		if (i % 2 == 0) {
			CHECK_EQUAL(ofl_aio_result(requests[i], &result), 0);
			CHECK_EQUAL(result.error, 0);
			ofl_aio_release(requests[i]);
		}
		CHECK_EQUAL(pread(fd, found, sizeof(found), (off_t)(i * sizeof(found))),
			    sizeof(found));
		CHECK(!memcmp(found, bytes[i], sizeof(found)));
	}
	close(fd);
}

struct mixer {
	pthread_t thread;
	struct ofl_aio *queue;
	int fd;
	unsigned int number;
};

#define NUM_MIXERS  100
#define MIXER_BYTES 10001

static void *run_mixer(void *argument)
{
	const struct mixer *mixer = argument;
	unsigned char written[MIXER_BYTES], found[MIXER_BYTES];
	uint64_t offset = (uint64_t)mixer->number * MIXER_BYTES;

	for (unsigned int round = 0; round < 5; round++) {
		fill(written, MIXER_BYTES, mixer->number * 16 + round);
		CHECK_EQUAL(move(mixer->queue, OFL_AIO_WRITE, mixer->fd, written,
				 MIXER_BYTES, offset)
				    .error,
			    0);
		CHECK_EQUAL(move(mixer->queue, OFL_AIO_READ, mixer->fd, found,
				 MIXER_BYTES, offset)
				    .error,
			    0);
		CHECK(!memcmp(written, found, MIXER_BYTES));
	}
	return NULL;
}

static void test_many_threads_mix_reads_and_writes(void)
{
	static struct mixer mixers[NUM_MIXERS];
	struct ofl_aio_stats stats;
	struct ofl_aio *queue = open_queue();
	int fd = open_temporary(0);

	for (unsigned int i = 0; i < NUM_MIXERS; i++) {
		mixers[i] = (struct mixer){.queue = queue, .fd = fd, .number = i};
		CHECK_EQUAL(
			pthread_create(&mixers[i].thread, NULL, run_mixer, &mixers[i]),
			0);
	}
	for (unsigned int i = 0; i < NUM_MIXERS; i++)
		CHECK_EQUAL(pthread_join(mixers[i].thread, NULL), 0);

	ofl_aio_read_stats(queue, &stats);
	CHECK_EQUAL(stats.read_requests, NUM_MIXERS * 5);
	CHECK_EQUAL(stats.write_requests, NUM_MIXERS * 5);
	CHECK_EQUAL(stats.read_bytes, NUM_MIXERS * 5 * MIXER_BYTES);
	CHECK_EQUAL(stats.write_bytes, NUM_MIXERS * 5 * MIXER_BYTES);
	ofl_aio_close(queue);
	close(fd);
}

static void run_all(void)
{
	test_what_was_written_is_read_back();
	test_a_direct_file_round_trips();
	test_a_read_beyond_the_end_tells_what_it_found();
	test_errors_of_the_system_arrive();
	test_a_full_file_tells_how_far_it_got();
	test_wrong_arguments_are_refused();
	test_close_carries_out_what_was_submitted();
	test_many_threads_mix_reads_and_writes();
}

static bool is_supported(void)
{
	const struct ofl_aio_options options = {.backend = backend,
						.queue_depth = QUEUE_DEPTH,
						.block_bytes = BLOCK_BYTES};
	struct ofl_aio *queue;
	int error = ofl_aio_open(&options, &queue);

	if (error == -ENOSYS || error == -EPERM || error == -EAGAIN ||
	    error == -EOPNOTSUPP)
		return false;
	CHECK_EQUAL(error, 0);
	ofl_aio_close(queue);
	return true;
}

int main(void)
{
	const char *const probed[] = {"libaio", "io_uring"};
	bool skipped_any = false;

	backend = "threads";
	run_all();
	for (size_t i = 0; i < sizeof(probed) / sizeof(probed[0]); i++) {
		backend = probed[i];
		if (is_supported())
			run_all();
		else
			skipped_any = true;
	}
	return skipped_any ? SKIPPED : 0;
}
