import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0020_replicas_over_nodes'),
    ]

    operations = [
        migrations.AddField(
            model_name='replicamember',
            name='exit_after_seconds',
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='replicamember',
            name='exit_code',
            field=models.IntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='replicamember',
            name='exit_log_tail',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.TextField(), blank=True, default=list, size=None),
        ),
        migrations.AddField(
            model_name='replicamember',
            name='exit_signal',
            field=models.PositiveSmallIntegerField(blank=True, null=True),
        ),
    ]
