"""Give every deployment its first release, and every replica the release that it runs."""

from django.db import migrations

_RELEASES = """
INSERT INTO serving_release
    (id, deployment_id, number, model_id, engine, engine_options, replica_memory_bytes, created_at, created_by)
SELECT gen_random_uuid(), d.id, 1, d.model_id, d.engine, d.engine_options, d.replica_memory_bytes, d.created_at, ''
FROM serving_deployment d
WHERE NOT EXISTS (SELECT 1 FROM serving_release r WHERE r.deployment_id = d.id)
"""
_REPLICAS = """
UPDATE serving_replica SET release_id = r.id
FROM serving_release r
WHERE r.deployment_id = serving_replica.deployment_id AND r.number = 1 AND serving_replica.release_id IS NULL
"""


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0007_releases'),
    ]

    operations = [
        migrations.RunSQL(_RELEASES, migrations.RunSQL.noop),
        migrations.RunSQL(_REPLICAS, migrations.RunSQL.noop),
    ]
