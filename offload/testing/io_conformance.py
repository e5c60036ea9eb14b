"""The laws of the I/O engine: a backend is right if a subclass of `IOConformance` passes.

```python
class TestMyBackend(IOConformance):
    def make_engine(self, **options: int) -> Engine:
        return Engine("my-backend", **options)
```
"""

from offload.testing.io_bytes_laws import BytesLaws
from offload.testing.io_error_laws import ErrorLaws
from offload.testing.io_life_laws import LifeLaws
from offload.testing.io_ownership_laws import OwnershipLaws
from offload.testing.io_waiting_laws import WaitingLaws


class IOConformance(BytesLaws, ErrorLaws, WaitingLaws, OwnershipLaws, LifeLaws):
    """All laws. Subclasses say how an engine is made; pytest collects the rest."""
