"""A wave names its failure domains: several nodes of which no rack is known may be in one."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0002_durations_by_kind")]

    operations = [
        migrations.AddField(
            model_name="wave",
            name="domains",
            field=models.JSONField(
                blank=True,
                default=list,
                help_text="Its failure domains: one, or nodes of which no rack is known.",
            ),
        )
    ]
