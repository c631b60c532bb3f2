"""How conversations leave a replica, and how that ended."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0004_model_config'),
    ]

    operations = [
        migrations.AddField(
            model_name='replica',
            name='departure',
            field=models.JSONField(blank=True, default=dict, help_text='How its conversations leave it while it serves; empty: they stay.'),
        ),
        migrations.AddField(
            model_name='replica',
            name='handed_over_at',
            field=models.DateTimeField(blank=True, help_text='Since when it only ends what is open: its conversations have left.', null=True),
        ),
        migrations.AddField(
            model_name='replica',
            name='left_behind',
            field=models.PositiveIntegerField(blank=True, help_text='Conversations that had not left it when its time to drain was up.', null=True),
        ),
    ]
