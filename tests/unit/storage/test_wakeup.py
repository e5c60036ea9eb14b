import signal

from offload.storage.wakeup import Wakeup


def test_a_wait_goes_on_after_signals_that_were_handled():
    wakeup, handled = Wakeup(), []

    def handle(*_):
        handled.append(None)
        if len(handled) == 5:  # the first may come before the wait
            signal.setitimer(signal.ITIMER_REAL, 0)
            wakeup.wake()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)

        wakeup.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert len(handled) == 5
    wakeup.close()
