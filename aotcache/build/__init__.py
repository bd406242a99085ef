"""Planning and building: from a spec to published artifacts."""

from aotcache.build.local import plan, warm
from aotcache.build.plan import Cell, Plan, Row
from aotcache.build.report import Built, Progress, WarmReport

__all__ = ["Built", "Cell", "Plan", "Progress", "Row", "WarmReport", "plan", "warm"]
