"""Planning and building: from a spec to published artifacts."""

from aotcache.build.local import Built, Progress, WarmReport, plan, warm
from aotcache.build.plan import Cell, Plan, Row

__all__ = ["Built", "Cell", "Plan", "Progress", "Row", "WarmReport", "plan", "warm"]
