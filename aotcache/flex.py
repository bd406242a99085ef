"""Drop-in flex attention: change the import, and drop `torch.compile`.

```python
from aotcache.flex import create_block_mask, flex_attention
```

Both take and give what torch's functions do, and run compiled artifacts, which
`aotcache warm` builds from the calls that it finds while it captures a drafter.
"""

from __future__ import annotations

from aotcache.runtime.flex import create_block_mask, flex_attention

__all__ = ["create_block_mask", "flex_attention"]
