"""What drains already was told to: it does not begin again by waiting for its conversations."""

from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0012_replica_leaving'),
    ]

    operations = [
        migrations.RunSQL(
            "UPDATE serving_replica SET handed_over_at = status_changed_at WHERE status = 'draining'",
            migrations.RunSQL.noop,
        ),
    ]
