from .api import exclusive_scan, inclusive_scan, plan
from .containers import BatchedCSR, CSRChain
from .pattern import Pattern
from .plan import ScanPlan
from .schedule import Schedule
