"""What made the controllers, or a person, move a conversation."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('inference_sessions', '0004_carrier_of_relocations'),
    ]

    operations = [
        migrations.AddField(
            model_name='relocation',
            name='trigger',
            field=models.CharField(choices=[('asked', 'asked'), ('leaving', 'leaving'), ('balance', 'balance')], default='asked', help_text='`asked` by a person, its replica is `leaving`, or `balance`.', max_length=16),
        ),
        migrations.AddConstraint(
            model_name='relocation',
            constraint=models.CheckConstraint(condition=models.Q(('trigger__in', ('asked', 'leaving', 'balance'))), name='relocation_trigger_known'),
        ),
    ]
