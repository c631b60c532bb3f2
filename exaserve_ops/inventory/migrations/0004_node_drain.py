from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inventory", "0003_node_installations")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="drain_reason",
            field=models.CharField(blank=True, max_length=500),
        ),
        migrations.AddField(
            model_name="node",
            name="drain_deadline_at",
            field=models.DateTimeField(
                blank=True, help_text="What still runs here then is stopped, open requests or not.", null=True
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="drain_status",
            field=models.CharField(
                choices=[("none", "none"), ("draining", "draining"), ("drained", "drained")],
                default="none",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="drain_changed_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddConstraint(
            model_name="node",
            constraint=models.CheckConstraint(
                condition=models.Q(("drain_status__in", ("none", "draining", "drained"))),
                name="node_drain_known",
            ),
        ),
    ]
