/* SPDX-License-Identifier: Apache-2.0 */
/* aio.h - asynchronous reads and writes of files: the public C interface. */
#ifndef OFL_AIO_H
#define OFL_AIO_H

#include <stddef.h>
#include <stdint.h>

/*
 * A queue takes transfers from any thread and carries them out on threads of
 * its own.  Each submitted transfer gives a request, on which any thread may
 * wait; waiting for one request never waits for another.
 *
 *	struct ofl_aio *q;
 *	struct ofl_aio_request *r;
 *	struct ofl_aio_options o = { .backend = "libaio", .queue_depth = 8, .block_bytes =
 *1 << 20 }; struct ofl_aio_transfer t = { fd, OFL_AIO_READ, 0, 512, buf, len, offset };
 *
 *	ofl_aio_open(&o, &q);
 *	ofl_aio_submit(q, &t, &r);
 *	ofl_aio_wait(r, -1);
 *	ofl_aio_result(r, &result);
 *	ofl_aio_release(r);
 *	ofl_aio_close(q);
 *
 * Functions return 0 or a count, or -errno; errno itself is not part of the
 * interface.  Nothing here prints, aborts or raises a signal.  The threads of a
 * queue block all signals.  A queue does not survive fork(): the child may use
 * neither it nor its requests.
 */

/* The text from here to "cffi: end" is read by csrc/build_aio.py too. */
/* cffi: begin */

#define OFL_AIO_READ  0
#define OFL_AIO_WRITE 1

#define OFL_AIO_NEEDED	   0
#define OFL_AIO_PREFETCH   1
#define OFL_AIO_WRITE_BACK 2

#define OFL_AIO_MAX_QUEUE_DEPTH 1024
#define OFL_AIO_MAX_BLOCK_BYTES 1073741824

struct ofl_aio;
struct ofl_aio_request;

#define OFL_AIO_FAULT_READS  1
#define OFL_AIO_FAULT_WRITES 2

/* What happens to some of the calls of the kernel that a queue would make. */
struct ofl_aio_fault {
	int operations;	      /* OFL_AIO_FAULT_READS, _WRITES or both */
	uint64_t start, end;  /* calls that touch these bytes of a file */
	uint32_t per_million; /* of them at random; 1000000: all */
	uint64_t skip;	      /* so many of those pass first */
	uint64_t count;	      /* then this happens to so many */
	int error;	      /* -errno: instead of the call; 0 */
	size_t max_bytes;     /* the call is shortened to them; 0: it is not */
	uint64_t delay_ns;    /* it takes at least as long */
};

/*
 * What the backend "fault" does to a queue.  The first rule that matches a call
 * decides.  The rates, 0 for none, are those of a token bucket that starts with
 * burst_bytes; one bucket for each direction, or with is_half_duplex one in which
 * a byte takes the time of its direction.
 *
 * Random choices depend on seed, place and number of calls for that place only.
 */
struct ofl_aio_faults {
	const struct ofl_aio_fault *rules;
	uint32_t num_rules;
	uint64_t seed;
	uint64_t read_bytes_per_s, write_bytes_per_s;
	uint64_t burst_bytes;
	int is_half_duplex;
};

struct ofl_aio_options {
	const char *backend;  /* "io_uring", "libaio", "threads" or "fault" */
	uint32_t queue_depth; /* 1 to OFL_AIO_MAX_QUEUE_DEPTH pieces in flight */
	size_t block_bytes;   /* 1 to OFL_AIO_MAX_BLOCK_BYTES bytes per piece */
	const struct ofl_aio_faults *faults; /* of "fault", copied; or NULL */
};

struct ofl_aio_transfer {
	int fd;		    /* stays open until the request is done */
	int operation;	    /* OFL_AIO_READ, OFL_AIO_WRITE */
	int priority;	    /* OFL_AIO_NEEDED, _PREFETCH, _WRITE_BACK */
	uint32_t alignment; /* a power of two; 1 unless fd is O_DIRECT */
	void *buf;	    /* not written to by OFL_AIO_WRITE */
	size_t len;	    /* bytes, also 0 and more than 2 GiB */
	uint64_t offset;    /* bytes from the start of the file */
};

struct ofl_aio_result {
	int error;	   /* 0 or -errno */
	size_t done_bytes; /* bytes from the start of buf that were transferred */
};

/* The counts of requests by latency: submitted to done, the time in line included.
 * Number i counts those of 2^i up to 2^(i+1) microseconds, the first all shorter
 * ones too, the last all longer ones. */
#define OFL_AIO_NUM_LATENCIES 32

struct ofl_aio_stats {
	uint64_t read_bytes; /* moved by the kernel, also of failed requests */
	uint64_t write_bytes;
	uint64_t read_requests; /* done, also with an error */
	uint64_t write_requests;
	uint64_t in_flight_ns;	    /* while at least one request was not done */
	uint64_t read_in_flight_ns; /* while at least one read was not done */
	uint64_t write_in_flight_ns;
	uint64_t both_bytes; /* moved while reads and writes were not done */
	uint64_t read_ns;    /* sum of the latencies */
	uint64_t write_ns;
	uint64_t read_latencies[OFL_AIO_NUM_LATENCIES];
	uint64_t write_latencies[OFL_AIO_NUM_LATENCIES];
	/* Handed to the kernel by ofl_aio_register() and ofl_aio_register_file(). */
	uint64_t registered_memory_pieces;
	uint64_t registered_file_pieces;
};

/*
 * Open a queue and start its threads.
 *
 * "io_uring" submits and waits with one call of the kernel, on one thread.  It is
 * there where liburing was found when this library was built.  It suits files
 * opened with O_DIRECT; on others the kernel may use threads of its own.
 * "libaio" submits through the kernel's io_submit(2), without the library of
 * that name, on one thread.  It suits files opened with O_DIRECT; on others the
 * kernel carries out each piece inside io_submit, one after the other.
 * "threads" has queue_depth threads that call pread(2) and pwrite(2).
 * "fault" is "threads" with the faults that the options name: for tests.
 *
 * A transfer is cut into pieces of block_bytes; at most queue_depth pieces of
 * all transfers are in flight.  The more urgent go first; but while both reads and
 * writes wait, the less urgent of the two directions has a quarter of the pieces in
 * flight, or a half at the same priority (none at a depth too small for that).
 *
 * Returns 0, or -EINVAL (unknown backend, a value out of range, also in a fault),
 * -ENOMEM, -EAGAIN (libaio: more than /proc/sys/fs/aio-max-nr requests; threads: no more
 * threads allowed), -ENOSYS or -EPERM (the kernel or a container refuses
 * io_uring_setup or io_setup), -EOPNOTSUPP (io_uring: built without liburing),
 * -EMFILE.  On error *queue is not changed and nothing is left.
 */
int ofl_aio_open(const struct ofl_aio_options *options, struct ofl_aio **queue);

/*
 * Carry out all transfers that were submitted, stop the threads, free the queue.
 *
 * Requests stay valid until they are released.  No other call may use the queue
 * once this one has begun.
 */
void ofl_aio_close(struct ofl_aio *queue);

/*
 * Start a transfer and return at once; its outcome comes from the request.
 *
 * Pieces of a more urgent priority start before those of a less urgent one;
 * within a priority transfers start in the order of submission.  Short
 * transfers are continued.  EINTR and EAGAIN are retried for some seconds.
 * After an error no further piece of the transfer is started.
 *
 * The queue owns buf until the request is done, also if that reports an error.
 * *transfer itself is copied.
 *
 * Returns 0, or -EINVAL (operation, priority or alignment; buf, len or offset
 * or the queue's block_bytes not a multiple of alignment), -EOVERFLOW (the end
 * lies beyond 2^63 - 1), -ENOMEM.  On error *request is not changed.
 * Thread-safe.  Does not block.
 */
int ofl_aio_submit(struct ofl_aio *queue, const struct ofl_aio_transfer *transfer,
		   struct ofl_aio_request **request);

/*
 * Wait until the request is done, at most timeout_ns; forever if it is < 0.
 *
 * Everything the transfer wrote to memory is visible to the caller afterwards.
 *
 * Returns 0, or -ETIMEDOUT (the transfer goes on).  Thread-safe, also several
 * threads on one request.
 */
int ofl_aio_wait(struct ofl_aio_request *request, int64_t timeout_ns);

/* Return 1 if the request is done, else 0.  Thread-safe.  Does not block. */
int ofl_aio_is_done(struct ofl_aio_request *request);

/*
 * Store the outcome of a request.
 *
 * error is that of the lowest byte that failed; all bytes below done_bytes were
 * transferred, later ones perhaps.  -ENODATA: the file ends after done_bytes.
 * -EIO also says that the kernel accepted no byte of a write.
 *
 * Returns 0, or -EBUSY (not done yet: wait first).  Thread-safe.
 */
int ofl_aio_result(struct ofl_aio_request *request, struct ofl_aio_result *result);

/*
 * Have 1 added to the eventfd(2) event_fd when the request is done, or now if it is.
 * A negative event_fd takes that back: afterwards the old one may be closed.
 *
 * Returns 0, or -EBUSY (another one is set).  Thread-safe.  Does not block, unless
 * the counter of a blocking eventfd is full.
 */
int ofl_aio_notify(struct ofl_aio_request *request, int event_fd);

/*
 * Give up the caller's hold on the request, done or not.  The transfer goes on;
 * its buffer still belongs to the queue until then.
 */
void ofl_aio_release(struct ofl_aio_request *request);

/*
 * Start no further piece of the transfers that were submitted.  Those that are not
 * done then end with -ECANCELED as soon as their pieces in flight have ended;
 * nothing is in flight for a transfer that had not begun.  The queue goes on.
 * Thread-safe.  Does not block.
 */
void ofl_aio_cancel(struct ofl_aio *queue);

/*
 * Register memory that many transfers will use, so that the kernel looks up and
 * holds its pages once and not for each transfer.  Pieces that lie inside it use
 * the registration; results are the same with and without.
 *
 * The pages count against RLIMIT_MEMLOCK.  The memory stays mapped until
 * ofl_aio_unregister() or the end of ofl_aio_close(): else transfers to a new
 * mapping at its address would reach the old pages.
 *
 * Returns 0, or -EOPNOTSUPP (the backend or the kernel has no such thing), -ENOMEM
 * (RLIMIT_MEMLOCK), -ENOSPC (256 pieces of 1 GiB are registered), -EINVAL, -EFAULT.
 * On error nothing is registered and transfers work all the same.  Thread-safe.
 */
int ofl_aio_register(struct ofl_aio *queue, void *buf, size_t len);

/* End the registration that began at buf; no transfer may be using the memory.
 * Thread-safe. */
void ofl_aio_unregister(struct ofl_aio *queue, void *buf);

/*
 * Register a file that many transfers will use, so that the kernel looks it up and
 * holds it once.  Transfers of its descriptor use the registration; results are the
 * same with and without.
 *
 * ofl_aio_unregister_file() comes before close(fd), except after the end of
 * ofl_aio_close(): the number may be given to another file, and transfers to that
 * one would reach this one.  A registered file stays open in the kernel.
 *
 * Returns 0, also if it is registered already, or -EOPNOTSUPP (the backend or the
 * kernel has no such thing), -ENOSPC (64 files are registered), -EBADF.  On error
 * transfers work all the same.  Thread-safe.
 */
int ofl_aio_register_file(struct ofl_aio *queue, int fd);

/* End the registration of a file; no transfer may be using it.  Thread-safe. */
void ofl_aio_unregister_file(struct ofl_aio *queue, int fd);

/* Store the counters since the queue was opened.  Thread-safe. */
void ofl_aio_read_stats(struct ofl_aio *queue, struct ofl_aio_stats *stats);

/* cffi: end */

#endif /* OFL_AIO_H */
