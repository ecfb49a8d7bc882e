# What type checkers and editors know of the names that __init__.py loads when they are first used.
from agl_otel.adapters import *  # noqa: F403  # as above
from agl_otel.algorithms import *  # noqa: F403  # as above
from agl_otel.compat.config import *  # noqa: F403  # as above
from agl_otel.compat.logging import *  # noqa: F403  # as above
from agl_otel.emit import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.env_var import *  # noqa: F403  # as above
from agl_otel.execution import *  # noqa: F403  # as above
from agl_otel.litagent import *  # noqa: F403  # as above
from agl_otel.llm_proxy import *  # noqa: F403  # as above
from agl_otel.runner import *  # noqa: F403  # as above
from agl_otel.store import *  # noqa: F403  # as above
from agl_otel.tracer import *  # noqa: F403  # as above
from agl_otel.trainer import *  # noqa: F403  # as above
from agl_otel.types import *  # noqa: F403  # as above

__version__: str
__all__: list[str]
