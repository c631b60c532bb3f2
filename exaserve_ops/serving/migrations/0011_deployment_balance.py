"""Whether and when sessions of a deployment are balanced, and whether they are now."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0010_model_storage'),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='balance_sessions',
            field=models.BooleanField(default=True, help_text='Move sessions off replicas whose KV memory they overfill.'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='balance_from_percent',
            field=models.PositiveSmallIntegerField(default=90, help_text="How full of active sessions a replica's KV memory is for that, at least."),
        ),
        migrations.AddField(
            model_name='deployment',
            name='balance_gap_percent',
            field=models.PositiveSmallIntegerField(default=30, help_text='How much emptier another replica is for that, at least.'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='balancing_since',
            field=models.DateTimeField(blank=True, editable=False, help_text='Since when its sessions are being balanced.', null=True),
        ),
        migrations.AddField(
            model_name='deployment',
            name='balancing_note',
            field=models.CharField(blank=True, editable=False, max_length=300),
        ),
    ]
