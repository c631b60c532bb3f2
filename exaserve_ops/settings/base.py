"""Settings that every installation shares. What differs comes from `env.py`."""

from __future__ import annotations

from pathlib import Path

import django_stubs_ext
from csp.constants import NONE, SELF

from exaserve_ops.inventory.domain.installation import INSTALLATION
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.steps import ACTIONS
from exaserve_ops.settings.env import read_environment
from exaserve_ops.validation.domain.lifecycle import CHECK, VALIDATION

ENV = read_environment()
BASE_DIR = Path(__file__).resolve().parents[2]

SECRET_KEY = ENV.secret_key
DEBUG = False
ALLOWED_HOSTS = ENV.hosts
CSRF_TRUSTED_ORIGINS = [ENV.origin]
FORCE_SCRIPT_NAME = ENV.base_path or None

INSTALLED_APPS = [
    "exaserve_ops.access",
    "exaserve_ops.audit",
    "exaserve_ops.telemetry",
    "exaserve_ops.inventory",
    "exaserve_ops.health",
    "exaserve_ops.weights",
    "exaserve_ops.serving",
    "exaserve_ops.sessions",
    "exaserve_ops.validation",
    "exaserve_ops.rollouts",
    "exaserve_ops.dashboard",
    "exaserve_ops.api",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_filters",
    "django_htmx",
    "csp",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django.contrib.postgres",
    "exaserve_ops",  # no models of its own; here so that Django finds the management commands
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    # Deny by default: a page without a login says so on purpose, with `login_not_required`.
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "exaserve_ops.urls"
ASGI_APPLICATION = "exaserve_ops.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "exaserve_ops.dashboard.frame.page_frame",
            ],
        },
    },
]

DATABASES = {"default": ENV.database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "fleet"
LOGOUT_REDIRECT_URL = "login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "exaserve_ops.dashboard.vendor.PlotlyFinder",
]
STATIC_ROOT = ENV.var_dir / "static"
SERVESTATIC_USE_FINDERS = True  # from the packages themselves: no collection step to forget

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = ENV.uses_tls
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if ENV.uses_tls else None
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:", "blob:"],
        "connect-src": [SELF, ENV.origin.replace("http", "ws", 1)],
        "object-src": [NONE],
        "base-uri": [SELF],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    },
}

CHANNEL_LAYERS = {
    "default": {
        # Pub/sub: the default layer keeps a list for each reader and delivers a tenth as much.
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [ENV.redis_url], "prefix": "exaops:ws"},
    },
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "exaserve_ops.api.authentication.ApiKeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["exaserve_ops.api.permissions.ModelPermissions"],
    "DEFAULT_PAGINATION_CLASS": "exaserve_ops.api.pagination.Page",
    "DEFAULT_FILTER_BACKENDS": [
        "django_filters.rest_framework.DjangoFilterBackend",
        "rest_framework.filters.OrderingFilter",
    ],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "exaserve_ops.api.schema.OpsSchema",
    "EXCEPTION_HANDLER": "exaserve_ops.api.errors.handle",
    "PAGE_SIZE": 50,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "ExaServe Ops",
    "DESCRIPTION": "Nodes, deployments, replicas and sessions of an inference fleet.",
    "VERSION": "1",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SERVE_INCLUDE_SCHEMA": False,
    "ENUM_NAME_OVERRIDES": {
        "DeploymentStatus": DEPLOYMENT.choices,
        "ReplicaStatus": REPLICA.choices,
        "RolloutStatus": ROLLOUT.choices,
        "WaveStatus": WAVE.choices,
        "ValidationStatus": VALIDATION.choices,
        "CheckStatus": CHECK.choices,
        "InstallationStatus": INSTALLATION.choices,
        "InstallationWork": "exaserve_ops.inventory.models.NodeInstallation.Action",
        "PlanAction": [(action, action) for action in ACTIONS],
    },
    "SWAGGER_UI_DIST": "SIDECAR",
    # Without this, the page asks a validator on the internet about our schema.
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "validatorUrl": None},
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
}

# Chores only: short, idempotent jobs. Commands to nodes go through `workers.agent.celery`'s queues.
CELERY_BROKER_URL = ENV.redis_url.replace("unix://", "redis+socket://", 1)
CELERY_TASK_DEFAULT_QUEUE = "chores"
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_TIME_LIMIT = 120
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 600,
    "socket_timeout": 10,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
    "health_check_interval": 10,
}

# Idempotent however often they run: a doubled beat costs a query.
CELERY_BEAT_SCHEDULE = {
    f"retain-{app}": {"task": f"exaops.{app}.retain", "schedule": 3600.0}
    for app in ("access", "audit", "sessions", "telemetry")
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": "INFO"},
}

django_stubs_ext.monkeypatch()
