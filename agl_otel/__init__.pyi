# What type checkers and editors know of the names that __init__.py loads when they are first used.
from agl_otel.adapters import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.algorithms import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.env_var import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.execution import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.litagent import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.llm_proxy import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.names.config import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.names.logging import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.runner import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.stores import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.tracer import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.compat.trainer import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.spans.emitted import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.store import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel.types import *  # noqa: F403  # __init__.py lists the names, and a test compares
from agl_otel_hook.emit import *  # noqa: F403  # __init__.py lists the names, and a test compares

__version__: str
__all__: list[str]
